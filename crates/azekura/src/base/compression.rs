//! Codecs: none, LZ4 (`lz4_flex`), zlib (`miniz_oxide`).

use std::cell::RefCell;
use std::fmt;
use std::ops::Deref;
use std::str::FromStr;

use lz4_flex::block::{CompressTable, compress_into_with_table, get_maximum_output_size};

use crate::base::error::{Error, Result};

/// How blocks are compressed when they are written.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// use azekura::{CompressionType, PartitionCreateOptions};
/// # let mut sizes = Vec::new();
/// for codec in [CompressionType::None, CompressionType::Lz4, CompressionType::Miniz(9)] {
///     let log = db.open_partition(&codec.to_string(), PartitionCreateOptions::default().compression(codec))?;
///     log.insert("text", "a line of text; ".repeat(1_000))?;
///     log.flush()?;
///     sizes.push(log.disk_space());
/// }
/// assert!(sizes[0] > sizes[1] && sizes[1] > sizes[2]);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum CompressionType {
    /// No compression.
    None,
    /// LZ4: fast compression and decompression.
    #[default]
    Lz4,
    /// zlib at a level of 0..=10: smaller and slower than LZ4.
    Miniz(u8),
}

/// The codec byte of a frame. All zlib levels have the same one, because decompression is the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Codec {
    None = 0,
    Lz4 = 1,
    Zlib = 2,
}

impl Codec {
    pub(crate) fn from_byte(byte: u8) -> Result<Codec> {
        match byte {
            0 => Ok(Codec::None),
            1 => Ok(Codec::Lz4),
            2 => Ok(Codec::Zlib),
            _ => Err(Error::unsupported(format!("codec {byte} needs a newer version"))),
        }
    }
}

/// The name: `none`, `lz4`, or `miniz:` and the level.
impl CompressionType {
    /// The two bytes that stored options contain: the codec and its level.
    pub(crate) fn to_stored(self) -> [u8; 2] {
        match self {
            CompressionType::None => [0, 0],
            CompressionType::Lz4 => [1, 0],
            CompressionType::Miniz(level) => [2, level],
        }
    }

    /// `None` for an unknown codec.
    pub(crate) fn from_stored(bytes: [u8; 2]) -> Option<CompressionType> {
        match bytes {
            [0, _] => Some(CompressionType::None),
            [1, _] => Some(CompressionType::Lz4),
            [2, level] => Some(CompressionType::Miniz(level)),
            _ => None,
        }
    }
}

impl fmt::Display for CompressionType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CompressionType::None => f.write_str("none"),
            CompressionType::Lz4 => f.write_str("lz4"),
            CompressionType::Miniz(level) => write!(f, "miniz:{level}"),
        }
    }
}

/// Parses what [`Display`](fmt::Display) writes.
///
/// ```
/// use azekura::CompressionType;
///
/// assert_eq!("miniz:6".parse::<CompressionType>().unwrap(), CompressionType::Miniz(6));
/// assert_eq!(CompressionType::Lz4.to_string(), "lz4");
/// ```
impl FromStr for CompressionType {
    type Err = Error;

    fn from_str(name: &str) -> Result<CompressionType> {
        let parsed = match name {
            "none" => Some(CompressionType::None),
            "lz4" => Some(CompressionType::Lz4),
            _ => name.strip_prefix("miniz:").and_then(|level| level.parse().ok()).map(CompressionType::Miniz),
        };
        let unknown =
            || Error::invalid(format!("compression {name:?} is not none, lz4, or miniz: and a level of 0..=10"));
        let parsed = parsed.ok_or_else(unknown)?;
        parsed.check().map(|()| parsed)
    }
}

impl CompressionType {
    /// Returns `Invalid` unless the level is in range.
    pub(crate) fn check(self) -> Result<()> {
        match self {
            CompressionType::Miniz(level) if level > 10 => {
                Err(Error::invalid(format!("zlib level {level} is out of range 0..=10")))
            }
            _ => Ok(()),
        }
    }

    /// Compresses `raw`. Returns `None` if the result is not at least an eighth smaller, because decompression costs
    /// time.
    pub(crate) fn compress(self, raw: &[u8]) -> Option<(Codec, CompressedBytes)> {
        let (codec, bytes) = match self {
            CompressionType::None => return None,
            CompressionType::Lz4 => (Codec::Lz4, compress_lz4(raw)),
            CompressionType::Miniz(level) => {
                let buffer = miniz_oxide::deflate::compress_to_vec_zlib(raw, level);
                (Codec::Zlib, CompressedBytes { len: buffer.len(), buffer })
            }
        };
        (bytes.len <= raw.len() - raw.len() / 8 && bytes.len < raw.len()).then_some((codec, bytes))
    }
}

/// Longest output buffer that a thread keeps, in bytes: that of a value of 1 MiB. A new buffer is cleared first. A
/// thread that compresses such a value keeps 1.1 MiB until it ends.
const KEPT_OUTPUT_MAX: usize = get_maximum_output_size(1 << 20);

/// What a thread keeps for its next compression. Allocating and clearing it took 3 % of the time of a block of 4 KiB,
/// and 11 % of that of a value of 185 KB.
struct Compressor {
    /// For inputs below 64 KiB.
    small: CompressTable,
    /// For longer inputs. Clearing it takes twice as long.
    large: CompressTable,
    output: Vec<u8>,
}

thread_local! {
    static COMPRESSOR: RefCell<Compressor> = RefCell::new(Compressor::new());
}

impl Compressor {
    fn new() -> Compressor {
        Compressor { small: CompressTable::small(), large: CompressTable::large(), output: Vec::new() }
    }

    fn compress_lz4(&mut self, raw: &[u8]) -> CompressedBytes {
        let mut buffer = std::mem::take(&mut self.output);
        let len_max = get_maximum_output_size(raw.len());
        if buffer.len() < len_max {
            buffer = vec![0; len_max];
        }
        let table = if raw.len() < usize::from(u16::MAX) { &mut self.small } else { &mut self.large };
        let len = compress_into_with_table(raw, &mut buffer, table).expect("the buffer has the maximum length");
        CompressedBytes { buffer, len }
    }
}

fn compress_lz4(raw: &[u8]) -> CompressedBytes {
    let with_kept = COMPRESSOR.try_with(|compressor| compressor.borrow_mut().compress_lz4(raw));
    // A thread-local destructor may write after the compressor was destroyed.
    with_kept.unwrap_or_else(|_| Compressor::new().compress_lz4(raw))
}

/// Compressed bytes. Dropping them returns their buffer to the thread.
#[derive(Debug)]
pub(crate) struct CompressedBytes {
    buffer: Vec<u8>,
    len: usize,
}

impl Deref for CompressedBytes {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.buffer[..self.len]
    }
}

impl Drop for CompressedBytes {
    fn drop(&mut self) {
        let keep = |compressor: &RefCell<Compressor>| {
            let kept = &mut compressor.borrow_mut().output;
            if self.buffer.len() <= KEPT_OUTPUT_MAX && kept.len() < self.buffer.len() {
                *kept = std::mem::take(&mut self.buffer);
            }
        };
        let _ends_with_its_thread = COMPRESSOR.try_with(keep);
    }
}

/// Decompresses to exactly the length of `raw`.
///
/// # Errors
/// `Corruption` if the bytes do not decompress to that length.
pub(crate) fn decompress(codec: Codec, stored: &[u8], raw: &mut [u8]) -> Result<()> {
    let len = match codec {
        Codec::None => {
            let len = stored.len().min(raw.len());
            raw[..len].copy_from_slice(&stored[..len]);
            Ok(stored.len())
        }
        Codec::Lz4 => lz4_flex::block::decompress_into(stored, raw).map_err(|error| error.to_string()),
        Codec::Zlib => miniz_oxide::inflate::decompress_slice_iter_to_slice(raw, std::iter::once(stored), true, false)
            .map_err(|status| format!("{status:?}")),
    };
    match len {
        Ok(len) if len == raw.len() => Ok(()),
        Ok(len) => Err(Error::corruption(format!("block decompresses to {len} bytes instead of {}", raw.len()))),
        Err(error) => Err(Error::corruption(format!("{codec:?} block does not decode: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codecs_round_trip_and_refuse_wrong_sizes() {
        let raw: Vec<u8> = (0..5000u32).flat_map(|i| (i / 7).to_le_bytes()).collect();
        for kind in
            [CompressionType::Lz4, CompressionType::Miniz(1), CompressionType::Miniz(6), CompressionType::Miniz(10)]
        {
            let (codec, stored) = kind.compress(&raw).expect("repetitive bytes shrink");
            let restored = |stored: &[u8], len| {
                let mut out = vec![0; len];
                decompress(codec, stored, &mut out).map(|()| out)
            };
            assert_eq!(restored(&stored, raw.len()).unwrap(), raw);
            assert!(restored(&stored, raw.len() - 1).is_err());
            assert!(restored(&stored, raw.len() + 1).is_err());
            assert!(restored(&stored[..stored.len() / 2], raw.len()).is_err());
        }
        assert!(CompressionType::None.compress(&raw).is_none());
        assert!(CompressionType::Lz4.compress(b"abc").is_none(), "incompressible bytes are stored unchanged");
        assert!(CompressionType::Miniz(11).check().is_err());
    }

    #[test]
    fn kept_tables_and_buffers_leave_no_trace() {
        let raw: Vec<u8> = (0..310_000u32).flat_map(|i| (i / 7).to_le_bytes()).collect();
        let check = |len: usize| {
            let (_, stored) = CompressionType::Lz4.compress(&raw[..len]).expect("repetitive bytes shrink");
            assert_eq!(*stored, *lz4_flex::block::compress(&raw[..len]), "{len} bytes");
            stored
        };
        let mut owned = Vec::new(); // one result exists while the next ones are made
        for len in [4096, 65_534, 65_535, 100, 65_536, 360_000, 4095, 1_240_000, 4096] {
            owned.push(check(len));
            check(len);
            if owned.len() == 3 {
                owned.clear();
            }
        }
        COMPRESSOR.with_borrow(|compressor| assert!((1..=KEPT_OUTPUT_MAX).contains(&compressor.output.len())));
    }

    #[test]
    fn names_round_trip_and_wrong_ones_are_refused() {
        for kind in [CompressionType::None, CompressionType::Lz4, CompressionType::Miniz(0), CompressionType::Miniz(10)]
        {
            assert_eq!(kind.to_string().parse::<CompressionType>().unwrap(), kind);
        }
        for name in ["", "LZ4", "miniz", "miniz:", "miniz:11", "miniz:256", "miniz:-1", "zstd"] {
            assert_eq!(name.parse::<CompressionType>().unwrap_err().kind(), crate::base::ErrorKind::Invalid, "{name}");
        }
    }
}
