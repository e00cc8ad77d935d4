//! Checksums and key hashes: xxh3-64, with a seed that binds the checksum to the position of the bytes.
//!
//! Checksums detect damage. They are not authentication.

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

/// The checksum of `bytes` under `seed`.
#[inline]
pub(crate) fn xxh3(seed: u64, bytes: &[u8]) -> u64 {
    xxh3_64_with_seed(bytes, seed)
}

/// The checksum of `head` followed by `tail` under `seed`, without copying them together. Equals [`xxh3`] of the
/// concatenation.
pub(crate) fn xxh3_concat(seed: u64, head: &[u8], tail: &[u8]) -> u64 {
    let mut state = Xxh3::with_seed(seed);
    state.update(head);
    state.update(tail);
    state.digest()
}

/// Bytes that are read and hashed at once.
const CHUNK_LEN: usize = 4096;
/// Buffer size for short inputs: small enough that zeroing the buffer is cheap.
const SMALL_CHUNK_LEN: usize = 256;

/// The checksum of `len` bytes. `read` copies the bytes from the given offset. Equals [`xxh3`] of all bytes.
pub(crate) fn xxh3_chunked(seed: u64, len: u64, read: impl Fn(u64, &mut [u8])) -> u64 {
    if len <= SMALL_CHUNK_LEN as u64 {
        let piece = &mut [0; SMALL_CHUNK_LEN][..len as usize];
        read(0, piece);
        return xxh3(seed, piece);
    }
    let mut piece = [0; CHUNK_LEN];
    if len <= CHUNK_LEN as u64 {
        let piece = &mut piece[..len as usize];
        read(0, piece);
        return xxh3(seed, piece);
    }
    let mut state = Xxh3::with_seed(seed);
    for at in (0..len).step_by(CHUNK_LEN) {
        let piece = &mut piece[..(len - at).min(CHUNK_LEN as u64) as usize];
        read(at, piece);
        state.update(piece);
    }
    state.digest()
}

/// The seed that binds a checksum to a file and an offset in it: bytes that were moved, or that belong to another
/// file, do not verify.
#[inline]
pub(crate) fn location_seed(file_id: &[u8; 16], offset: u64) -> u64 {
    let low = u64::from_le_bytes(file_id[..8].try_into().expect("eight bytes"));
    let high = u64::from_le_bytes(file_id[8..].try_into().expect("eight bytes"));
    // Odd multipliers keep the maps from halves and offsets to seeds one-to-one.
    low ^ high.wrapping_mul(0xC2B2_AE3D_27D4_EB4F) ^ offset.wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// The hash of a key for filters and hash indexes, under the seed of the database or the table.
#[inline]
pub(crate) fn key_hash(seed: u64, key: &[u8]) -> u64 {
    xxh3_64_with_seed(key, seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_parts_equal_the_whole() {
        let bytes: Vec<u8> = (0..600u32).map(|i| i as u8).collect();
        for cut in [0, 1, 8, 24, 240, 241, 599, 600] {
            assert_eq!(xxh3_concat(7, &bytes[..cut], &bytes[cut..]), xxh3(7, &bytes));
        }
        let bytes: Vec<u8> = (0..3 * CHUNK_LEN).map(|i| (i / 3) as u8).collect();
        for len in
            [0, 1, SMALL_CHUNK_LEN, SMALL_CHUNK_LEN + 1, CHUNK_LEN, CHUNK_LEN + 1, 2 * CHUNK_LEN, 3 * CHUNK_LEN - 1]
        {
            let read = |at: u64, out: &mut [u8]| out.copy_from_slice(&bytes[at as usize..][..out.len()]);
            assert_eq!(xxh3_chunked(7, len as u64, read), xxh3(7, &bytes[..len]));
        }
    }

    #[test]
    fn places_differ() {
        let id = [3; 16];
        assert_ne!(location_seed(&id, 0), location_seed(&id, 8));
        assert_ne!(location_seed(&id, 0), location_seed(&[4; 16], 0));
    }
}
