//! Strings as they were stored: up to 15 characters in place, longer ones in a buffer of their own. They end with a
//! zero byte, and their length is not stored.

use crate::failure::Result;
use crate::leaf::pool::Pool;

/// What a string takes in place, in bytes: 16 for characters, and a pointer of 16.
pub(crate) const TEXT_LEN: usize = 32;
/// Characters that need no buffer.
const INLINE_MAX: usize = 15;
const POINTER: usize = 16;

fn buffer(pool: &Pool, at: usize) -> Option<usize> {
    Some(pool.u64(at + POINTER) as usize).filter(|buffer| *buffer != 0)
}

/// Whether the characters stand in place.
pub(crate) fn is_short(pool: &Pool, at: usize) -> bool {
    buffer(pool, at).is_none()
}

/// The characters.
pub(crate) fn get(pool: &Pool, at: usize) -> Vec<u8> {
    let (mut from, mut bytes) = (buffer(pool, at).unwrap_or(at), Vec::new());
    while pool.bytes(from, 1)[0] != 0 {
        bytes.push(pool.bytes(from, 1)[0]);
        from += 1;
    }
    bytes
}

/// Changes the string; it has no zero byte.
///
/// # Errors
/// If the pool is full.
pub(crate) fn set(pool: &mut Pool, at: usize, characters: &[u8]) -> Result<()> {
    pool.snapshot(at, TEXT_LEN);
    let before = buffer(pool, at);
    let mut place = [0; TEXT_LEN];
    if characters.len() <= INLINE_MAX {
        place[..characters.len()].copy_from_slice(characters);
    } else {
        // What is allocated is all zeros, and so ends with one.
        let buffer = pool.allocate(characters.len() + 1)?;
        pool.store(buffer, characters);
        place[POINTER..POINTER + 8].copy_from_slice(&(buffer as u64).to_le_bytes());
    }
    pool.store(at, &place);
    before.into_iter().for_each(|buffer| pool.release(buffer));
    Ok(())
}

/// Makes it empty.
pub(crate) fn reset(pool: &mut Pool, at: usize) {
    pool.snapshot(at, TEXT_LEN);
    let before = buffer(pool, at);
    pool.store(at, &[0; TEXT_LEN]);
    before.into_iter().for_each(|buffer| pool.release(buffer));
}

/// Exchanges two structures of that length, whatever is in them.
pub(crate) fn swap(pool: &mut Pool, one: usize, other: usize, len: usize) {
    pool.snapshot(one, len);
    pool.snapshot(other, len);
    let (first, second) = (pool.bytes(one, len).to_vec(), pool.bytes(other, len).to_vec());
    pool.store(one, &second);
    pool.store(other, &first);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leaf::pool::scratch;

    #[test]
    fn strings_of_every_length_round_trip_and_swap() {
        let (_dir, mut pool) = scratch(4 << 20);
        pool.begin();
        let (one, other) = (pool.allocate(TEXT_LEN).unwrap(), pool.allocate(TEXT_LEN).unwrap());
        pool.commit();
        for len in 0..70 {
            let characters = vec![b'a' + len as u8 % 26; len];
            pool.begin();
            set(&mut pool, one, &characters).unwrap();
            set(&mut pool, other, b"the other one, of some length").unwrap();
            swap(&mut pool, one, other, TEXT_LEN);
            pool.commit();
            assert_eq!(get(&pool, other), characters);
            assert_eq!(get(&pool, one), b"the other one, of some length");
            assert_eq!(is_short(&pool, other), len <= 15);
        }
        pool.begin();
        reset(&mut pool, other);
        pool.commit();
        assert!(is_short(&pool, other) && get(&pool, other).is_empty());
        assert!(pool.bytes_taken() < 2000, "buffers are used again");
    }
}
