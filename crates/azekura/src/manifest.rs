#![doc = include_str!("../docs/format/manifest.md")]

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::base::event::DroppedAfterDamage;
use crate::base::file_format::{FileHeader, FileKind};
use crate::base::manifest_state::ManifestState;
use crate::base::sync::lock;
use crate::base::version_edit::VersionEdit;
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::record_log::frame::LogFileIdentity;
use crate::record_log::reader::{LogReadResult, LogSource, RecordLogReader, SeqnoOrder};
use crate::record_log::writer::{LogPoison, LogRecord, LogSink, RecordLogWriter};
use crate::vfs::open_files::DataFiles;
use crate::vfs::{File, Fs, OpenMode};

/// File name of the manifest.
pub(crate) const MANIFEST_NAME: &str = "MANIFEST";
/// File name of a manifest that is being written.
pub(crate) const MANIFEST_TEMP_NAME: &str = "MANIFEST.tmp";

/// The manifest, open for appending. Thread safe.
///
/// Lock order: `sync_lock`, then `file_state`. Only a rewrite holds `file_state` during a sync, and the first append
/// after a rewrite that could not open the directory.
///
/// Once [`Manifest::sync`] has returned, every edit that was appended before is durable, or the manifest is poisoned.
/// So no caller commits an edit again:
/// - No edit is appended before the name of the file is durable, because the sync of the directory may have to be
///   repeated.
/// - A rewrite first syncs the old file, so that its edits are durable in the old file and in the new one.
#[derive(Debug)]
pub(crate) struct Manifest {
    fs: Arc<dyn Fs>,
    dir: PathBuf,
    /// Held by the thread that syncs.
    sync_lock: Mutex<()>,
    file_state: Mutex<ManifestFileState>,
    poison: LogPoison,
}

#[derive(Debug)]
struct ManifestFileState {
    file: Arc<dyn File>,
    identity: LogFileIdentity,
    /// Offset of the next frame.
    end_offset: u64,
    /// Number of records that were written to earlier files of this manifest.
    earlier_records: u64,
    /// Number of the last record that was written. The first record of a file has number 1.
    last_seqno: SeqNo,
    /// Number of the last record that is known to be durable.
    durable_seqno: SeqNo,
    /// Whether the file's name is durable: the directory was synced after the rename.
    name_durable: bool,
    writer: RecordLogWriter,
}

/// The file id of a manifest, and the length of its file in bytes. Both stay the same until edits are added.
pub(crate) type ManifestIdentity = ([u8; 16], u64);

/// The open tables and blob files of a follower, as its manifest names them; see
/// [`Database::followed_files`](crate::Database::followed_files).
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// let db = azekura::Config::new(&path).open()?;
/// db.open_partition("fruit", Default::default())?.insert("apple", "red")?;
/// db.partition("fruit")?.flush()?;
/// let followed = azekura::Config::new(&path).open_follower()?.followed_files()?;
/// let report = azekura::inspect::verify_follower(&followed, &mut |_, _| {})?;
/// assert_eq!(report.files.len(), 1);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct FollowedFiles {
    pub(crate) manifest_state: Arc<ManifestState>,
    pub(crate) files: Arc<DataFiles>,
    pub(crate) fs: Arc<dyn Fs>,
    pub(crate) dir: PathBuf,
}

/// Content of a manifest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LoadedManifest {
    /// The version edits, in the order in which they were written.
    pub(crate) edits: Vec<VersionEdit>,
    /// Offset of the end of the last record.
    pub(crate) bytes: u64,
    /// Random id of the file.
    pub(crate) file_id: [u8; 16],
    /// Valid records after a torn one, if there are any.
    pub(crate) dropped_after_damage: Option<DroppedAfterDamage>,
}

impl Manifest {
    /// Writes a new manifest with `edits`, and replaces the existing one atomically and durably. `file_id` must be
    /// fresh random bytes.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace`. The old manifest remains, unless the last step failed, which makes the new name
    /// durable: then power loss may leave either one.
    pub(crate) fn create(fs: Arc<dyn Fs>, dir: &Path, file_id: [u8; 16], edits: &[VersionEdit]) -> Result<Manifest> {
        let mut state = ManifestFileState::create(&*fs, dir, file_id, edits)?;
        install_new_manifest(&*fs, dir)?;
        fs.sync_dir(dir)?;
        state.name_durable = true;
        Ok(Manifest {
            fs,
            dir: dir.to_path_buf(),
            sync_lock: Mutex::new(()),
            file_state: Mutex::new(state),
            poison: LogPoison::default(),
        })
    }

    /// Reads the manifest; writes nothing.
    ///
    /// # Errors
    /// `Io` with `os_kind` `NotFound` if there is none; `Corruption` with file and offset if what was durable is
    /// damaged; `Unsupported` if a newer version wrote it.
    pub(crate) fn load(fs: Arc<dyn Fs>, dir: &Path) -> Result<LoadedManifest> {
        let path = dir.join(MANIFEST_NAME);
        let file = fs.open(&path, OpenMode::Read)?;
        let mut loaded = read_manifest(LogSource::File(&*file)).map_err(|e| e.in_file(&path))?;
        if let Some(dropped) = &mut loaded.dropped_after_damage {
            dropped.file = path;
        }
        Ok(loaded)
    }

    /// The identity of the manifest as it is now.
    ///
    /// # Errors
    /// As [`Manifest::load`].
    pub(crate) fn identity(fs: &dyn Fs, dir: &Path) -> Result<ManifestIdentity> {
        let path = dir.join(MANIFEST_NAME);
        let file = fs.open(&path, OpenMode::Read)?;
        let mut head = [0; FileHeader::LEN];
        let read = file.length().and_then(|len| Ok((len, file.read_at(&mut head, 0)?)));
        let header =
            read.and_then(|(len, got)| Ok((FileHeader::decode(FileKind::Manifest, &head[..got])?.file_id, len)));
        header.map_err(|error| error.in_file(&path))
    }

    /// The state of the manifest, if it is another file than this one: each open creates one.
    ///
    /// # Errors
    /// As [`Manifest::load`].
    pub(crate) fn load_if_replaced(fs: &Arc<dyn Fs>, dir: &Path, file_id: [u8; 16]) -> Result<Option<ManifestState>> {
        if Manifest::identity(&**fs, dir)?.0 == file_id {
            return Ok(None);
        }
        ManifestState::replay(&Manifest::load(Arc::clone(fs), dir)?.edits).map(Some)
    }

    /// Appends edits that take effect together. They survive a crash of the process, and after [`Manifest::sync`]
    /// also power loss.
    ///
    /// # Errors
    /// `OutOfSpace`, and `Io` if the process has too many open files: nothing was appended, and a later call may
    /// succeed. After any other failure, this and every later call returns `Poisoned`.
    pub(crate) fn append(&self, edits: &[VersionEdit]) -> Result<()> {
        self.poison.check()?;
        if edits.is_empty() {
            return Ok(());
        }
        let mut state = self.lock_file_state();
        self.sync_name(&mut state)?;
        let end = state.end_offset;
        state.append(edits).map_err(|error| {
            // A part of the record may be in the file. It is removed, because a shorter record written over it would
            // leave its tail.
            let nothing_written = state.file.length().is_ok_and(|length| length <= end);
            let full = error.kind() == ErrorKind::OutOfSpace;
            let undone = full && (nothing_written || state.file.set_length(end).is_ok());
            if undone { error } else { self.poison.set(error) }
        })
    }

    /// Makes all appended edits durable. Concurrent callers share one sync, and appending threads do not wait for it.
    ///
    /// # Errors
    /// `Poisoned`, in this and every later call, once a sync has failed.
    pub(crate) fn sync(&self) -> Result<()> {
        self.poison.check()?;
        let wanted = self.lock_file_state().records();
        let _turn = self.lock_sync();
        self.poison.check()?;
        let (file, last) = {
            let state = self.lock_file_state();
            if state.durable_records() >= wanted {
                return Ok(());
            }
            (Arc::clone(&state.file), state.last_seqno)
        };
        file.sync_data().map_err(|e| self.poison.set(e))?;
        let mut state = self.lock_file_state();
        state.durable_seqno = state.durable_seqno.max(last);
        state.append_watermark();
        Ok(())
    }

    /// Appends edits and makes them durable.
    ///
    /// # Errors
    /// As [`Manifest::append`] and [`Manifest::sync`].
    #[cfg(test)]
    pub(crate) fn commit(&self, edits: &[VersionEdit]) -> Result<()> {
        self.append(edits)?;
        self.sync()
    }

    /// Replaces the manifest by a new one that contains `live` only. The caller prevents appends between the time
    /// that `live` describes and the return.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace`: the old manifest remains in use. `Io` because of too many open files may also mean that
    /// the new one is in use; the next [`Manifest::append`] makes its name durable. `Poisoned` if a sync has failed.
    pub(crate) fn rewrite(&self, file_id: [u8; 16], live: &[VersionEdit]) -> Result<()> {
        let _turn = self.lock_sync();
        let mut state = self.lock_file_state();
        self.poison.check()?;
        if state.durable_seqno < state.last_seqno {
            state.file.sync_data().map_err(|e| self.poison.set(e))?;
            state.durable_seqno = state.last_seqno;
        }
        let mut new = ManifestFileState::create(&*self.fs, &self.dir, file_id, live)?;
        install_new_manifest(&*self.fs, &self.dir)?;
        new.earlier_records = state.records();
        *state = new;
        self.sync_name(&mut state)
    }

    /// Makes the name of a new manifest durable. If the directory cannot be opened, no sync has failed, and the next
    /// append tries again.
    fn sync_name(&self, state: &mut ManifestFileState) -> Result<()> {
        if !state.name_durable {
            let synced = self.fs.sync_dir(&self.dir);
            synced.map_err(|e| if e.is_too_many_open_files() { e } else { self.poison.set(e) })?;
            state.name_durable = true;
        }
        Ok(())
    }

    /// Length in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.lock_file_state().end_offset
    }

    fn lock_file_state(&self) -> MutexGuard<'_, ManifestFileState> {
        lock(&self.file_state)
    }

    fn lock_sync(&self) -> MutexGuard<'_, ()> {
        lock(&self.sync_lock)
    }
}

/// Renames the new manifest to its name; if that fails, removes it.
fn install_new_manifest(fs: &dyn Fs, dir: &Path) -> Result<()> {
    let temporary = dir.join(MANIFEST_TEMP_NAME);
    fs.rename(&temporary, &dir.join(MANIFEST_NAME)).inspect_err(|_| drop(fs.remove_file(&temporary)))
}

impl ManifestFileState {
    /// Writes and syncs a manifest under its temporary name.
    fn create(fs: &dyn Fs, dir: &Path, file_id: [u8; 16], edits: &[VersionEdit]) -> Result<ManifestFileState> {
        let path = dir.join(MANIFEST_TEMP_NAME);
        if fs.exists(&path)? {
            fs.remove_file(&path)?;
        }
        let file = fs.open(&path, OpenMode::Create)?;
        let place = LogFileIdentity { file_id, epoch: 0 };
        let end = FileHeader::LEN as u64;
        let (last, writer) = (SeqNo::ZERO, RecordLogWriter::new());
        let mut state = ManifestFileState {
            file,
            identity: place,
            end_offset: end,
            earlier_records: 0,
            last_seqno: last,
            durable_seqno: SeqNo::ZERO,
            name_durable: false,
            writer,
        };
        let mut fill = || {
            let header = FileHeader { kind: FileKind::Manifest, file_id };
            state.file.write_at(&header.encode(), 0)?;
            state.append(edits)?;
            // True by the time the file has its name.
            state.durable_seqno = state.last_seqno;
            state
                .write_frames(|writer, place, last, durable, sink| writer.add_watermark(place, last, durable, sink))?;
            state.file.sync_data()
        };
        fill().inspect_err(|_| drop(fs.remove_file(&path)))?;
        Ok(state)
    }

    /// Number of records that were written to this and all earlier files.
    fn records(&self) -> u64 {
        self.earlier_records + self.last_seqno.0
    }

    /// Number of these that are known to be durable.
    fn durable_records(&self) -> u64 {
        self.earlier_records + self.durable_seqno.0
    }

    fn append(&mut self, edits: &[VersionEdit]) -> Result<()> {
        let mut payload = Vec::new();
        for edit in edits {
            edit.encode(&mut payload);
        }
        let payload = payload.as_slice();
        let first = self.last_seqno.plus(1);
        self.write_frames(|writer, place, _, durable, sink| {
            writer.add_record(place, &LogRecord { first_seqno: first, count: 1, durable_seqno: durable, payload }, sink)
        })?;
        self.last_seqno = first;
        Ok(())
    }

    /// Writes a note, unsynced, of how far the manifest is durable. The note only distinguishes damage from a torn
    /// tail. After a failed attempt, the next record overwrites the note, because a record is longer than a note.
    fn append_watermark(&mut self) {
        let _ =
            self.write_frames(|writer, place, last, durable, sink| writer.add_watermark(place, last, durable, sink));
    }

    fn write_frames(
        &mut self,
        put: impl FnOnce(&mut RecordLogWriter, &LogFileIdentity, SeqNo, SeqNo, &mut LogSink<'_>) -> Result<()>,
    ) -> Result<()> {
        self.writer.reset(self.end_offset);
        let file = &self.file;
        let mut sink = |bytes: &[u8], offset: u64| file.write_at(bytes, offset);
        put(&mut self.writer, &self.identity, self.last_seqno, self.durable_seqno, &mut sink)?;
        self.writer.flush(&mut sink)?;
        self.end_offset = self.writer.position();
        Ok(())
    }
}

/// Encodes a manifest in memory. `file_id` must differ from that of another content under the same name.
///
/// # Errors
/// None; the signature is that of writing to a file.
pub(crate) fn encode_manifest(file_id: [u8; 16], edits: &[VersionEdit]) -> Result<Vec<u8>> {
    let mut payload = Vec::new();
    edits.iter().for_each(|edit| edit.encode(&mut payload));
    let place = LogFileIdentity { file_id, epoch: 0 };
    let mut out = FileHeader { kind: FileKind::Manifest, file_id }.encode().to_vec();
    let mut writer = RecordLogWriter::new();
    writer.reset(out.len() as u64);
    let mut sink = |bytes: &[u8], offset: u64| {
        out.truncate(usize::try_from(offset).unwrap_or(usize::MAX));
        out.extend_from_slice(bytes);
        Ok(())
    };
    let record =
        LogRecord { first_seqno: SeqNo::ZERO.plus(1), count: 1, durable_seqno: SeqNo::ZERO, payload: &payload };
    writer.add_record(&place, &record, &mut sink)?;
    writer.flush(&mut sink)?;
    Ok(out)
}

/// Decodes a manifest in memory, for inspection and fuzzing.
///
/// # Errors
/// As [`Manifest::load`], without a file name.
pub(crate) fn decode_manifest(bytes: &[u8]) -> Result<LoadedManifest> {
    read_manifest(LogSource::Bytes(bytes))
}

/// Decodes the edits of a manifest that can be read, also behind damage. They may contradict each other.
///
/// # Errors
/// `Corruption` if too many places look like frames.
pub(crate) fn salvage_edits(bytes: &[u8]) -> Result<Vec<VersionEdit>> {
    let mut edits = Vec::new();
    let head = bytes.get(..FileHeader::LEN).unwrap_or(bytes);
    let Ok(header) = FileHeader::decode(FileKind::Manifest, head) else { return Ok(edits) };
    let place = LogFileIdentity { file_id: header.file_id, epoch: 0 };
    let source = LogSource::Bytes(bytes);
    let mut reader = RecordLogReader::new(source, place, FileHeader::LEN as u64, SeqNo::ZERO, SeqnoOrder::Rising)?;
    loop {
        let at = reader.position();
        match reader.next()? {
            LogReadResult::Record(_) => {
                edits.extend(VersionEdit::decode_batch(reader.payload()?).unwrap_or_default());
            }
            LogReadResult::Watermark(_) => {}
            LogReadResult::End if reader.skip_damage(at)? => {}
            LogReadResult::End => return Ok(edits),
        }
    }
}

fn read_manifest(source: LogSource<'_>) -> Result<LoadedManifest> {
    let mut head = [0; FileHeader::LEN];
    let len = match source {
        LogSource::File(file) => file.read_at(&mut head, 0)?,
        LogSource::Bytes(bytes) => {
            let len = bytes.len().min(head.len());
            head[..len].copy_from_slice(&bytes[..len]);
            len
        }
    };
    let file_id = FileHeader::decode(FileKind::Manifest, &head[..len])?.file_id;
    let place = LogFileIdentity { file_id, epoch: 0 };
    let mut reader = RecordLogReader::new(source, place, FileHeader::LEN as u64, SeqNo::ZERO, SeqnoOrder::Consecutive)?;
    let mut edits = Vec::new();
    loop {
        let at = reader.position();
        match reader.next()? {
            LogReadResult::Record(_) => {
                edits.append(&mut VersionEdit::decode_batch(reader.payload()?).map_err(|e| e.at_offset(at))?);
            }
            LogReadResult::Watermark(_) => {}
            LogReadResult::End => break,
        }
    }
    let (bytes, offset, expected) = (reader.end(), reader.position(), reader.last().0 + 1);
    let behind = reader.scan_after_damage()?;
    // The first record was synced before the file was renamed.
    if behind.durable_seqno.0.max(1) >= expected {
        let message = format!("manifest is damaged: record {expected} cannot be read, though it was synced");
        return Err(Error::corruption(message).at_offset(offset));
    }
    let dropped = DroppedAfterDamage { file: PathBuf::new(), offset, frames: behind.frames };
    Ok(LoadedManifest { edits, bytes, file_id, dropped_after_damage: (behind.frames > 0).then_some(dropped) })
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::base::version_edit::{FileNumber, PartitionEdit, PartitionId, WalEpoch};
    use crate::testing::seeded_rng::SeededRng;
    use crate::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, Survival};

    fn dir() -> &'static Path {
        Path::new("/")
    }

    fn edit(n: u64) -> VersionEdit {
        VersionEdit::WalSegmentAdded { epoch: WalEpoch(n as u32), file: FileNumber(n << (n % 40)) }
    }

    fn edits(range: std::ops::Range<u64>) -> Vec<VersionEdit> {
        range.map(edit).collect()
    }

    fn create_manifest(fs: impl Fs + 'static) -> (Arc<dyn Fs>, Manifest) {
        let fs: Arc<dyn Fs> = Arc::new(fs);
        let manifest = Manifest::create(Arc::clone(&fs), dir(), [1; 16], &edits(0..3)).unwrap();
        (fs, manifest)
    }

    fn load(fs: &Arc<dyn Fs>) -> Result<LoadedManifest> {
        Manifest::load(Arc::clone(fs), dir())
    }

    fn manifest_bytes(fs: &Arc<dyn Fs>) -> Vec<u8> {
        let file = fs.open(&dir().join(MANIFEST_NAME), OpenMode::Read).unwrap();
        let mut bytes = vec![0; file.length().unwrap() as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    #[test]
    fn append_and_rewrite_round_trip() {
        let (fs, manifest) = create_manifest(MemFs::new());
        manifest.append(&edits(3..5)).unwrap();
        manifest.append(&[]).unwrap();
        manifest.commit(&edits(5..9)).unwrap();
        let loaded = load(&fs).unwrap();
        assert_eq!((loaded.edits, loaded.bytes), (edits(0..9), manifest.size()));
        assert_eq!(loaded.dropped_after_damage, None);
        manifest.rewrite([2; 16], &edits(4..6)).unwrap();
        manifest.append(&edits(6..7)).unwrap();
        manifest.sync().unwrap();
        assert_eq!(load(&fs).unwrap().edits, edits(4..7));
        assert!(!fs.exists(&dir().join(MANIFEST_TEMP_NAME)).unwrap());
        assert_eq!(decode_manifest(&manifest_bytes(&fs)).unwrap().edits, edits(4..7));
    }

    #[test]
    fn leftover_temporary_manifest_is_replaced() {
        let fs: Arc<dyn Fs> = Arc::new(MemFs::new());
        assert_eq!(load(&fs).unwrap_err().os_kind(), Some(io::ErrorKind::NotFound));
        fs.open(&dir().join(MANIFEST_TEMP_NAME), OpenMode::Create).unwrap().write_at(&[7; 5000], 0).unwrap();
        Manifest::create(Arc::clone(&fs), dir(), [1; 16], &[]).unwrap();
        assert_eq!(load(&fs).unwrap().edits, []);
        Manifest::create(Arc::clone(&fs), dir(), [1; 16], &edits(0..2)).unwrap();
        assert_eq!(load(&fs).unwrap().edits, edits(0..2));
    }

    #[test]
    fn a_record_larger_than_a_frame() {
        let (fs, manifest) = create_manifest(MemFs::new());
        let settings = vec![3; (1 << 24) + 1000];
        let big = [PartitionEdit::Settings { settings }.of(PartitionId(1))];
        manifest.commit(&big).unwrap();
        manifest.commit(&edits(7..8)).unwrap();
        let loaded = load(&fs).unwrap();
        assert!(loaded.edits[3] == big[0] && loaded.edits[4] == edit(7));
    }

    #[test]
    fn damaged_manifest_gives_prefix_or_error() {
        let (fs, manifest) = create_manifest(MemFs::new());
        for n in 3..8 {
            manifest.commit(&edits(n..n + 1)).unwrap();
        }
        // The record was written and not synced, and no later record says that it was durable.
        manifest.append(&edits(8..9)).unwrap();
        manifest.append(&edits(9..10)).unwrap();
        let good = manifest_bytes(&fs);
        let whole = edits(0..10);
        let mut dropped = 0;
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x41;
            match decode_manifest(&bad) {
                Ok(loaded) => {
                    assert!(whole.starts_with(&loaded.edits) && loaded.edits.len() >= 8, "byte {at}");
                    dropped += usize::from(loaded.dropped_after_damage.is_some());
                }
                Err(e) => assert!(matches!(e.kind(), ErrorKind::Corruption | ErrorKind::Unsupported), "byte {at}: {e}"),
            }
            match decode_manifest(&good[..at]) {
                Ok(loaded) => assert!(whole.starts_with(&loaded.edits) && loaded.edits.len() >= 3, "cut at {at}"),
                Err(e) => assert_eq!(e.kind(), ErrorKind::Corruption, "cut at {at}"),
            }
        }
        assert!(dropped > 20, "{dropped}");
        let file = fs.open(&dir().join(MANIFEST_NAME), OpenMode::Write).unwrap();
        file.write_at(&[0xff; 8], 72).unwrap();
        let error = load(&fs).unwrap_err();
        assert_eq!((error.file(), error.offset()), (Some(dir().join(MANIFEST_NAME).as_path()), Some(64)));
    }

    #[test]
    fn random_bytes_are_refused() {
        let mut rng = SeededRng::with_stream(3, 3);
        let (fs, _manifest) = create_manifest(MemFs::new());
        let good = manifest_bytes(&fs);
        for _ in 0..2000 {
            let mut bad: Vec<u8> = (0..rng.below(300)).map(|_| rng.next_u64() as u8).collect();
            assert!(decode_manifest(&bad).is_err());
            bad.splice(0..0, good[..64].iter().copied());
            assert_eq!(decode_manifest(&bad).unwrap_err().kind(), ErrorKind::Corruption);
        }
    }

    #[test]
    fn power_loss_keeps_old_or_new_manifest() {
        let run = |fs: &Arc<dyn Fs>| -> Result<(), (u64, u64)> {
            let (mut wrote, mut durable) = (0, 0);
            let fail = |_| (wrote, durable);
            let manifest = Manifest::create(Arc::clone(fs), dir(), [1; 16], &edits(0..1)).map_err(fail)?;
            (wrote, durable) = (1, 1);
            for n in 1..20 {
                wrote = n + 1;
                manifest.append(&edits(n..n + 1)).map_err(|_| (wrote, durable))?;
                if n % 3 == 0 {
                    manifest.sync().map_err(|_| (wrote, durable))?;
                    durable = n + 1;
                }
                if n % 7 == 0 {
                    manifest.rewrite([n as u8 + 1; 16], &edits(0..n + 1)).map_err(|_| (wrote, durable))?;
                    durable = n + 1;
                }
            }
            Err((wrote, durable))
        };
        let whole = MemFs::new();
        let _ = run(&(Arc::new(whole.clone()) as Arc<dyn Fs>));
        for op in 0..=whole.op_count() {
            let mem = MemFs::new();
            mem.freeze_after(Some(op));
            let (wrote, durable) = run(&(Arc::new(mem.clone()) as Arc<dyn Fs>)).unwrap_err();
            for seed in 0..6 {
                let crashed = mem.fork();
                let ways = [Survival::Nothing, Survival::Everything, Survival::Random];
                crashed.crash(ways[seed.min(2)], op * 8 + seed as u64);
                let fs: Arc<dyn Fs> = Arc::new(crashed);
                match load(&fs) {
                    Ok(loaded) => {
                        assert!(edits(0..wrote.max(1)).starts_with(&loaded.edits), "operation {op} seed {seed}");
                        assert!(loaded.edits.len() as u64 >= durable, "operation {op} seed {seed}");
                    }
                    Err(e) => assert!(durable == 0 && e.os_kind() == Some(io::ErrorKind::NotFound), "{op} {seed}: {e}"),
                }
            }
        }
    }

    #[test]
    fn disk_full_is_harmless_other_failures_poison() {
        let fs = FaultFs::new(Arc::new(MemFs::new()));
        let (dynamic, manifest) = create_manifest(fs.clone());
        let size = manifest.size();
        fs.inject(FaultPlan::new(OpKind::Write, 1, Fault::Error(io::ErrorKind::StorageFull)));
        assert_eq!(manifest.append(&edits(3..9)).unwrap_err().kind(), ErrorKind::OutOfSpace);
        assert_eq!((manifest.size(), manifest_bytes(&dynamic).len() as u64), (size, size));
        manifest.commit(&edits(3..4)).unwrap();
        fs.inject(FaultPlan::new(OpKind::Rename, 1, Fault::Error(io::ErrorKind::Other)));
        assert_eq!(manifest.rewrite([3; 16], &edits(0..1)).unwrap_err().kind(), ErrorKind::Io);
        manifest.commit(&edits(4..5)).unwrap();
        assert_eq!(load(&dynamic).unwrap().edits, edits(0..5));
        for (op, what) in [
            (OpKind::Write, Fault::Short),
            (OpKind::Sync, Fault::Error(io::ErrorKind::Other)),
            (OpKind::SyncDir, Fault::Error(io::ErrorKind::Other)),
        ] {
            let fs = FaultFs::new(Arc::new(MemFs::new()));
            let (_, manifest) = create_manifest(fs.clone());
            fs.inject(FaultPlan::new(op, 1, what));
            let failed = match op {
                OpKind::SyncDir => manifest.rewrite([4; 16], &edits(0..3)),
                _ => manifest.commit(&edits(3..4)),
            };
            assert_eq!(failed.unwrap_err().kind(), ErrorKind::Poisoned, "{op:?}");
            assert_eq!(manifest.append(&edits(5..6)).unwrap_err().kind(), ErrorKind::Poisoned);
            assert_eq!(manifest.sync().unwrap_err().kind(), ErrorKind::Poisoned);
            assert_eq!(manifest.rewrite([5; 16], &[]).unwrap_err().kind(), ErrorKind::Poisoned);
        }
    }

    #[test]
    fn nothing_is_synced_twice() {
        let fs = FaultFs::new(Arc::new(MemFs::new()));
        let (_, manifest) = create_manifest(fs.clone());
        let before = fs.count(OpKind::Sync);
        manifest.sync().unwrap();
        assert_eq!(fs.count(OpKind::Sync), before);
        manifest.append(&edits(3..4)).unwrap();
        manifest.append(&edits(4..5)).unwrap();
        manifest.sync().unwrap();
        manifest.sync().unwrap();
        assert_eq!(fs.count(OpKind::Sync), before + 1);
    }

    /// An attempt to open the directory that fails because of too many open files is not a failed sync.
    #[test]
    fn rewrite_ends_when_files_may_open_again() {
        let faulty = FaultFs::new(Arc::new(MemFs::new()));
        let (fs, manifest) = create_manifest(faulty.clone());
        let _held_by_a_sync = Arc::clone(&manifest.lock_file_state().file);
        faulty.limit_open(Some(faulty.open_count() + 1));
        assert!(manifest.rewrite([2; 16], &edits(0..3)).unwrap_err().is_too_many_open_files());
        manifest.sync().unwrap();
        assert!(manifest.append(&edits(3..4)).unwrap_err().is_too_many_open_files());
        faulty.limit_open(None);
        assert_eq!(load(&fs).unwrap().edits, edits(0..3), "a call that is repeated would append its edits twice");
        manifest.commit(&edits(3..4)).unwrap();
        assert_eq!(load(&fs).unwrap().edits, edits(0..4));
    }

    /// A thread had appended an edit, and another one rewrote the manifest before the first one's sync. That sync
    /// failed because the directory could not be opened, although the edit was applied. Power loss leaves the old
    /// manifest or the new one.
    #[test]
    fn appended_edit_is_durable_during_a_rewrite() {
        for survival in [Survival::Nothing, Survival::MetadataOnly, Survival::Everything] {
            let machine = MemFs::new();
            let faulty = FaultFs::new(Arc::new(machine.clone()));
            let (_, manifest) = create_manifest(faulty.clone());
            manifest.append(&edits(3..4)).unwrap();
            faulty.inject(FaultPlan::new(OpKind::SyncDir, 1, Fault::TooManyOpenFiles));
            assert!(manifest.rewrite([2; 16], &edits(0..4)).unwrap_err().is_too_many_open_files());
            manifest.sync().unwrap();
            machine.crash(survival, 1);
            let fs: Arc<dyn Fs> = Arc::new(machine);
            assert_eq!(load(&fs).unwrap().edits, edits(0..4), "{survival:?}");
        }
    }
}
