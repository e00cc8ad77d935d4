//! Which segment files there are, and which of them are the log.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::base::version_edit::{FileNumber, WalEpoch};
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::record_log::read_window::LogSource;
use crate::record_log::reader::SeqnoOrder;
use crate::vfs::{File, Fs, OpenMode};
use crate::wal::format::{SEGMENT_HEADER_LEN, WalSegmentHeader, parse_segment_name, segment_path};
use crate::wal::options::WalReplayOptions;

/// A segment file with a header that verifies.
#[derive(Clone, Debug)]
pub(crate) struct WalSegmentFile {
    pub(crate) file: FileNumber,
    pub(crate) path: PathBuf,
    pub(crate) handle: Arc<dyn File>,
    pub(crate) header: WalSegmentHeader,
}

/// What lies in the directory.
#[derive(Debug, Default)]
pub(crate) struct WalSegmentSet {
    /// The segments that the manifest lists, and those that follow on them since the manifest noted the end of the log,
    /// by epoch: the log, if they are linked.
    pub(crate) segments: BTreeMap<WalEpoch, WalSegmentFile>,
    /// Listed segments whose file is missing or has a header that does not verify, by epoch.
    pub(crate) unreadable: BTreeMap<WalEpoch, Error>,
    /// Segments that are newer than the noted end of the log, but neither listed nor linked: an open that did not come
    /// to its end left them, or the manifest has lost its own end.
    pub(crate) unlinked: Vec<WalSegmentFile>,
    /// Every file with a header that verifies. What a crash left half made is not among them: listed again, and then
    /// losing the header of its new life, it would look damaged.
    pub(crate) valid_files: Vec<FileNumber>,
    /// The highest epoch that any header has, or that the manifest knows.
    pub(crate) highest_epoch: WalEpoch,
}

/// Reads the headers of all segment files.
///
/// # Errors
/// `Corruption` naming the file if two have the same epoch, or if one belongs to another database; `Unsupported` if a
/// newer version wrote one.
pub(crate) fn find_segments(
    fs: &dyn Fs,
    dir: &Path,
    database_id: [u8; 16],
    options: &WalReplayOptions,
) -> Result<WalSegmentSet> {
    let mut segments = WalSegmentSet::default();
    let mut found: BTreeMap<FileNumber, Result<WalSegmentFile>> = BTreeMap::new();
    for entry in fs.read_dir(dir)? {
        let is_ours =
            |file: &FileNumber| entry.is_file && (options.file_number_limit == 0 || file.0 < options.file_number_limit);
        if let Some(file) = parse_segment_name(&entry.name).filter(is_ours) {
            let segment = open_segment_file(fs, dir, file)?;
            check_database_id(&segment, database_id)?;
            found.insert(file, segment);
        }
    }
    check_epochs(&found)?;
    segments.valid_files = found.iter().filter(|(_, segment)| segment.is_ok()).map(|(file, _)| *file).collect();
    let (ended, _) = options.wal_end.unwrap_or_default();
    let listed_epochs = options.listed_segments.iter().map(|(epoch, _)| *epoch);
    let epochs = found.values().flatten().map(|segment| segment.header.epoch).chain(listed_epochs).chain([ended]);
    segments.highest_epoch = epochs.max().unwrap_or_default();
    let mut known: BTreeSet<WalEpoch> =
        options.listed_segments.iter().map(|(epoch, _)| *epoch).chain([ended]).collect();
    for (epoch, file) in &options.listed_segments {
        match resolve_listed_segment(found.remove(file), *epoch, *file, dir) {
            Ok(Some(segment)) => drop(segments.segments.insert(*epoch, segment)),
            Ok(None) => {} // never synced
            Err(e) => drop(segments.unreadable.insert(*epoch, e)),
        }
    }
    // What the manifest does not list counts only if it was begun since the manifest noted the end of the log: all else
    // is of an earlier life, or was left by an open that did not come to its end.
    let mut unlisted: Vec<WalSegmentFile> = found.into_values().flatten().filter(|s| s.header.epoch > ended).collect();
    unlisted.sort_by_key(|segment| segment.header.epoch);
    for segment in unlisted {
        if known.contains(&segment.header.previous_epoch) {
            known.insert(segment.header.epoch);
            segments.segments.insert(segment.header.epoch, segment);
        } else {
            segments.unlinked.push(segment);
        }
    }
    Ok(segments)
}

/// Segment files that are not part of the log and that no recovery mode can use: segments from before the noted end of
/// the log, and segments that an unfinished rewrite of the log has left. A segment of the second kind has no record
/// that says that the log was durable. An unlinked segment with such a record is kept, because it may hold synced
/// commits of which the manifest has lost the entry.
///
/// # Errors
/// As [`find_segments`].
pub(crate) fn removable_segments(
    fs: &dyn Fs,
    dir: &Path,
    database_id: [u8; 16],
    options: &WalReplayOptions,
) -> Result<Vec<FileNumber>> {
    let segments = find_segments(fs, dir, database_id, options)?;
    let is_leftover = |segment: &WalSegmentFile| {
        let reader = segment.header.reader(LogSource::File(&*segment.handle), SeqnoOrder::Consecutive);
        let scan = reader.and_then(|mut reader| reader.scan_after_damage());
        scan.is_ok_and(|scan| scan.durable_seqno == SeqNo::ZERO)
    };
    let mut kept: Vec<FileNumber> = options.listed_segments.iter().map(|(_, file)| *file).collect();
    kept.extend(segments.segments.values().map(|segment| segment.file));
    kept.extend(segments.unlinked.iter().filter(|s| !is_leftover(s)).map(|segment| segment.file));
    Ok(segments.valid_files.into_iter().filter(|file| !kept.contains(file)).collect())
}

/// The outer error is about the file system, the inner one about the header.
fn open_segment_file(fs: &dyn Fs, dir: &Path, file: FileNumber) -> Result<Result<WalSegmentFile>> {
    let path = segment_path(dir, file);
    let handle = fs.open(&path, OpenMode::Read)?;
    let mut bytes = [0; SEGMENT_HEADER_LEN];
    let len = handle.read_at(&mut bytes, 0)?;
    Ok(match WalSegmentHeader::decode(&bytes[..len]) {
        Ok(header) => Ok(WalSegmentFile { file, path, handle, header }),
        Err(e) if e.kind() == ErrorKind::Corruption => Err(e.in_file(&path)),
        Err(e) => return Err(e.in_file(&path)),
    })
}

fn check_database_id(segment: &Result<WalSegmentFile>, database_id: [u8; 16]) -> Result<()> {
    match segment {
        Ok(segment) if segment.header.database_id != database_id => {
            Err(Error::corruption("segment belongs to another database").in_file(&segment.path))
        }
        _ => Ok(()),
    }
}

fn check_epochs(found: &BTreeMap<FileNumber, Result<WalSegmentFile>>) -> Result<()> {
    let mut seen: BTreeMap<WalEpoch, &WalSegmentFile> = BTreeMap::new();
    for segment in found.values().flatten().filter(|segment| segment.header.epoch != WalEpoch(0)) {
        if let Some(other) = seen.insert(segment.header.epoch, segment) {
            let (epoch, other) = (segment.header.epoch.0, other.path.display());
            let message = format!("segment has epoch {epoch}, and so has {other}: one of them is a copy");
            return Err(Error::corruption(message).in_file(&segment.path));
        }
    }
    Ok(())
}

/// What the manifest's entry leads to; `None` if the segment was never synced, so that power loss left the file as it
/// was before.
fn resolve_listed_segment(
    found: Option<Result<WalSegmentFile>>,
    epoch: WalEpoch,
    file: FileNumber,
    dir: &Path,
) -> Result<Option<WalSegmentFile>> {
    let path = segment_path(dir, file);
    let Some(segment) = found else {
        return Err(Error::corruption("log segment is missing").in_file(path));
    };
    let segment = segment?;
    match segment.header.epoch {
        found if found == epoch => Ok(Some(segment)),
        found if found < epoch => Ok(None),
        found => {
            let message = format!("segment should have epoch {} and has {}", epoch.0, found.0);
            Err(Error::corruption(message).in_file(path))
        }
    }
}

impl WalSegmentSet {
    /// The segment that follows on `epoch`: of those that name it, the one that was begun last.
    pub(crate) fn successor(&self, epoch: WalEpoch) -> Option<&WalSegmentFile> {
        self.segments_after(epoch).rev().find(|segment| segment.header.previous_epoch == epoch)
    }

    /// Segments with a higher epoch, ascending.
    pub(crate) fn segments_after(&self, epoch: WalEpoch) -> impl DoubleEndedIterator<Item = &WalSegmentFile> {
        self.segments.range(WalEpoch(epoch.0.saturating_add(1))..).map(|(_, segment)| segment)
    }

    /// Whether two segments in a row follow on `epoch`: the second was begun only once `epoch` was synced.
    pub(crate) fn has_two_successors(&self, epoch: WalEpoch) -> bool {
        self.segments_after(epoch).any(|a| a.header.previous_epoch == epoch && self.successor(a.header.epoch).is_some())
    }

    /// The last sequence number that `epoch` may hold, because what follows on it starts there.
    pub(crate) fn last_seqno_before_successor(&self, epoch: WalEpoch) -> Option<SeqNo> {
        self.successor(epoch).map(|segment| SeqNo(segment.header.first_seqno.0 - 1))
    }
}
