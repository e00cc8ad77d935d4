//! The native file: partitions with their options, protected by checksums and an end mark.
//!
//! The file begins with [`MAGIC`] and a version (4 bytes). Frames follow; all numbers are little-endian:
//!
//! ```text
//! frame   = kind (1 byte), length of the payload (8 bytes), payload, XXH3-64 of all bytes of the frame before it
//! header  = kind H, JSON: {"partitions": [name, …]}
//! begin   = kind P, JSON: {"partition": name, "options": {…}}
//! entries = kind E, for each entry: length of the key (4 bytes), length of the value (4 bytes), key, value
//! expiring = kind X, as E, with the expiry time in milliseconds since 1970 (8 bytes) behind the lengths
//! end     = kind Z, JSON: {"entries": number of all entries}
//! file    = MAGIC, version, header, (begin, (entries | expiring)*)*, end
//! ```
//!
//! A file of version 1 has no frames of kind X, and no expiry times: its entries get the default time to live of their
//! partition. In a file of version 2, entries of kind E do not expire.

use std::io::{self, BufRead, Read};
use std::path::Path;

use azekura::{Database, Partition, PartitionCreateOptions};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

use crate::command::transfer::loader::{EntryLoader, LoadedExpiry};
use crate::command::transfer::report::{ImportError, TransferReport};
use crate::command::transfer::writer::ExportWriter;
use crate::encoding;
use crate::error::{CliError, Result};
use crate::interrupt;
use crate::open;
use crate::progress::ProgressReporter;

/// First bytes of a native file.
pub(super) const MAGIC: &[u8; 8] = b"AZEKEXP\n";
const VERSION: u32 = 2;
/// Size in bytes at which a frame of entries is written.
const FRAME_BYTES: usize = 1 << 20;
/// Length of the longest key of a database in bytes.
const KEY_LEN_MAX: u64 = 65_535;
/// Maximum length of a payload in bytes. A frame of entries that is shorter than [`FRAME_BYTES`] gets one more entry:
/// two lengths, an expiry time, a key, and a value whose length has 4 bytes. The JSON of all other frames is shorter.
const FRAME_LEN_MAX: u64 = FRAME_BYTES as u64 + 16 + KEY_LEN_MAX + u32::MAX as u64;

/// Writes the partitions of these names, in this order.
pub(super) fn export(
    db: &Database,
    names: &[String],
    out: &mut ExportWriter<'_>,
    progress: &ProgressReporter,
) -> Result<TransferReport> {
    let mut report = TransferReport::default();
    let mut partitions = Vec::new();
    for name in names {
        match open::existing_partition(db, name) {
            Ok(partition) => partitions.push(partition),
            // The comparator of the partition is not available.
            Err(error) => report.skip(format!("partition {name:?}"), error.to_string()),
        }
    }
    out.put(MAGIC)?;
    out.put(&VERSION.to_le_bytes())?;
    let names: Vec<&str> = partitions.iter().map(|partition| &*partition.name).collect();
    put_json_frame(out, b'H', &json!({ "partitions": names }))?;
    for partition in &partitions {
        let options = partition.options();
        put_json_frame(out, b'P', &json!({ "partition": &*partition.name, "options": options }))?;
        export_entries(partition, out, &mut report, progress)?;
    }
    put_json_frame(out, b'Z', &json!({ "entries": report.entries }))?;
    Ok(report)
}

fn export_entries(
    partition: &Partition,
    out: &mut ExportWriter<'_>,
    report: &mut TransferReport,
    progress: &ProgressReporter,
) -> Result<()> {
    let mut payload = Vec::new();
    let mut kind = b'E';
    for entry in partition.entries() {
        interrupt::check()?;
        let entry = entry?;
        let (key, value, expiry_ms) = (entry.key(), entry.value()?, entry.expiry_ms());
        let entry_kind = if expiry_ms.is_some() { b'X' } else { b'E' };
        if !payload.is_empty() && (entry_kind != kind || payload.len() >= FRAME_BYTES) {
            put_frame(out, kind, &payload)?;
            payload.clear();
        }
        kind = entry_kind;
        payload.extend_from_slice(&(key.len() as u32).to_le_bytes());
        payload.extend_from_slice(&(value.len() as u32).to_le_bytes());
        payload.extend(expiry_ms.iter().flat_map(|expiry_ms| expiry_ms.to_le_bytes()));
        payload.extend_from_slice(key);
        payload.extend_from_slice(&value);
        report.count(key, &value);
        progress.add(1);
    }
    if payload.is_empty() { Ok(()) } else { put_frame(out, kind, &payload) }
}

fn put_json_frame(out: &mut ExportWriter<'_>, kind: u8, payload: &Value) -> Result<()> {
    put_frame(out, kind, payload.to_string().as_bytes())
}

fn put_frame(out: &mut ExportWriter<'_>, kind: u8, payload: &[u8]) -> Result<()> {
    let mut frame = Vec::with_capacity(payload.len() + 17);
    frame.push(kind);
    frame.extend_from_slice(&(payload.len() as u64).to_le_bytes());
    frame.extend_from_slice(payload);
    frame.extend_from_slice(&xxh3_64(&frame).to_le_bytes());
    out.put(&frame)
}

/// What an import takes from a native file.
#[derive(Clone, Copy, Debug)]
pub(super) struct NativeSelection<'a> {
    /// The name of the only partition to store; of the new partition if the file contains one.
    pub(super) partition: Option<&'a str>,
    /// Create partitions with default options.
    pub(super) ignore_options: bool,
}

/// Stores the partitions of a native file.
pub(super) fn import(
    input: impl BufRead,
    source: &Path,
    selection: NativeSelection<'_>,
    loader: &mut EntryLoader<'_>,
) -> Result<(), ImportError> {
    let mut frames = FrameReader { input, source, offset: 0 };
    let version = frames.check_start()?;
    let (names, at) = frames.header()?;
    let renamed = if names.len() == 1 { selection.partition } else { None };
    if let (Some(wanted), true) = (selection.partition, names.len() != 1)
        && !names.iter().any(|name| name == wanted)
    {
        let message = format!("the file has no partition \"{wanted}\"; it has: {}", names.join(", "));
        return Err(ImportError::input(message, at));
    }
    if names.is_empty() {
        loader.begin_no_partition()?;
    }
    let (mut entries, mut begun, mut is_selected) = (0, 0, false);
    loop {
        let frame = frames.next()?;
        loader.progress.at_least(frames.offset);
        match frame.kind {
            b'P' => {
                let name = names.get(begun).ok_or_else(|| frame.unexpected())?;
                let options = frame.partition_options(name)?;
                begun += 1;
                is_selected = renamed.is_some() || selection.partition.is_none_or(|wanted| wanted == name);
                if is_selected {
                    let options = if selection.ignore_options { PartitionCreateOptions::default() } else { options };
                    loader.begin_partition(renamed.unwrap_or(name), options)?;
                }
            }
            b'E' | b'X' if begun > 0 => entries += frame.load_entries(version, is_selected, loader)?,
            b'Z' if begun == names.len() && frame.json()?["entries"] == entries => return frames.check_end(),
            _ => return Err(frame.unexpected()),
        }
    }
}

/// A frame with a valid checksum.
struct Frame {
    kind: u8,
    payload: Vec<u8>,
    /// Offset of the frame in the file.
    offset: u64,
}

impl Frame {
    fn unexpected(&self) -> ImportError {
        let message =
            format!("the frame at byte {} does not belong there: the file is not a valid export", self.offset);
        ImportError::input(message, self.offset)
    }

    fn json(&self) -> Result<Value, ImportError> {
        serde_json::from_slice(&self.payload).map_err(|_| self.unexpected())
    }

    fn partition_options(&self, name: &str) -> Result<PartitionCreateOptions, ImportError> {
        let begin = self.json()?;
        if begin["partition"] != name {
            return Err(self.unexpected());
        }
        serde_json::from_value(begin["options"].clone()).map_err(|error| {
            let message = format!("this version does not know the options of partition \"{name}\" ({error})");
            ImportError::input(message, self.offset)
        })
    }

    /// Passes the entries to the loader if `is_selected`, and returns their number.
    fn load_entries(&self, version: u32, is_selected: bool, loader: &mut EntryLoader<'_>) -> Result<u64, ImportError> {
        let mut rest = &*self.payload;
        let mut entries = 0;
        while !rest.is_empty() {
            let mut take = |n: usize| rest.split_off(..n).ok_or_else(|| self.unexpected());
            let length = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("four bytes")) as usize;
            let (key_len, value_len) = (length(take(4)?), length(take(4)?));
            let expiry = match (self.kind, version) {
                (b'X', _) => LoadedExpiry::At(Some(u64::from_le_bytes(take(8)?.try_into().expect("eight bytes")))),
                (_, 1) => LoadedExpiry::Default,
                _ => LoadedExpiry::At(None),
            };
            let (key, value) = (take(key_len)?, take(value_len)?);
            if is_selected {
                loader.put_expiring(key, value, expiry, || encoding::escaped(&key[..key.len().min(100)]))?;
            }
            entries += 1;
        }
        Ok(entries)
    }
}

struct FrameReader<'a, R> {
    input: R,
    source: &'a Path,
    /// Number of bytes that were read.
    offset: u64,
}

impl<R: BufRead> FrameReader<'_, R> {
    /// Reads exactly `n` bytes. Allocates as bytes arrive, because a damaged length may be of any size.
    fn take(&mut self, n: u64) -> Result<Vec<u8>, ImportError> {
        let mut bytes = Vec::new();
        let read = self.input.by_ref().take(n).read_to_end(&mut bytes);
        let read = read.map_err(|e: io::Error| CliError::os("read the input", self.source, e))? as u64;
        self.offset += read;
        if read < n {
            let message = format!("the file ends at byte {}, before its end mark: it was cut off", self.offset);
            return Err(ImportError::input(message, self.offset));
        }
        Ok(bytes)
    }

    /// Returns the version of the file.
    fn check_start(&mut self) -> Result<u32, ImportError> {
        let start = self.take(12)?;
        let version = u32::from_le_bytes(start[8..].try_into().expect("four bytes"));
        if !start.starts_with(MAGIC) {
            return Err(ImportError::input("this is not a native export of azekura", 0));
        }
        match version {
            1..=VERSION => Ok(version),
            _ => {
                let message =
                    format!("the file has version {version} of the native format; this program reads up to {VERSION}");
                Err(ImportError::input(message, 8))
            }
        }
    }

    /// The names of the partitions, and the offset of the header.
    fn header(&mut self) -> Result<(Vec<String>, u64), ImportError> {
        let frame = self.next()?;
        let names = frame.json()?["partitions"].clone();
        match serde_json::from_value(names).ok() {
            Some(names) if frame.kind == b'H' => Ok((names, frame.offset)),
            _ => Err(frame.unexpected()),
        }
    }

    fn next(&mut self) -> Result<Frame, ImportError> {
        let offset = self.offset;
        let mut frame = self.take(9)?;
        let length = u64::from_le_bytes(frame[1..].try_into().expect("eight bytes"));
        if length > FRAME_LEN_MAX {
            let message = format!("damaged: the frame at byte {offset} states a length of {length} bytes");
            return Err(ImportError::input(message, offset));
        }
        frame.extend(self.take(length)?);
        let checksum = self.take(8)?;
        if xxh3_64(&frame).to_le_bytes() != *checksum {
            let message = format!("damaged: the checksum of bytes {offset} to {} does not match", self.offset);
            return Err(ImportError::input(message, offset));
        }
        let kind = frame[0];
        Ok(Frame { kind, payload: frame.split_off(9), offset })
    }

    fn check_end(&mut self) -> Result<(), ImportError> {
        match self.input.fill_buf().map_err(|e| CliError::os("read the input", self.source, e))?.is_empty() {
            true => Ok(()),
            false => Err(ImportError::input(
                format!("other data follows the end mark, from byte {}", self.offset),
                self.offset,
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io::BufReader;

    use super::*;

    fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = [&[kind][..], &(payload.len() as u64).to_le_bytes(), payload].concat();
        frame.extend(xxh3_64(&frame).to_le_bytes());
        frame
    }

    /// A header whose JSON is no object ended the program with a panic.
    #[test]
    fn header_that_is_no_object_is_refused() {
        for payload in [&b"[1]"[..], b"7", b"null", b"{}", b"{\"partitions\":7}"] {
            let mut frames = FrameReader { input: &*frame(b'H', payload), source: Path::new("f"), offset: 0 };
            let Err(ImportError::Input { message, .. }) = frames.header() else { panic!("it was accepted") };
            assert!(message.contains("the frame at byte 0 does not belong there"), "{message}");
        }
    }

    /// An input without an end that counts the bytes read from it.
    struct EndlessInput<'a> {
        start: &'a [u8],
        bytes_read: &'a Cell<u64>,
    }

    impl Read for EndlessInput<'_> {
        fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
            let total = self.bytes_read.get() + buf.len() as u64;
            assert!(total <= 1 << 20, "{total} bytes were read");
            self.bytes_read.set(total);
            let (start, rest) = buf.split_at_mut(self.start.len().min(buf.len()));
            self.start.read_exact(start)?;
            rest.fill(0);
            Ok(buf.len())
        }
    }

    /// A damaged length made an import read the rest of the file into memory before it verified the checksum.
    #[test]
    fn too_long_frame_is_not_read() {
        for length in [FRAME_LEN_MAX + 1, u64::MAX] {
            let bytes_read = Cell::new(0);
            let start = [&frame(b'H', b"{}")[..], b"E", &length.to_le_bytes()].concat();
            let input = BufReader::with_capacity(64, EndlessInput { start: &start, bytes_read: &bytes_read });
            let mut frames = FrameReader { input, source: Path::new("f"), offset: 0 };
            assert_eq!(frames.next().unwrap().payload, b"{}");
            let Err(ImportError::Input { message, offset }) = frames.next() else { panic!("it was accepted") };
            assert!(message.contains(&format!("a length of {length} bytes")), "{message}");
            assert_eq!((offset, bytes_read.get()), (19, 64));
        }
    }
}
