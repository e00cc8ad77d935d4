#![doc = include_str!("../docs/format/manifest.md")]

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::base::edit::Edit;
use crate::base::event::DroppedAfterDamage;
use crate::base::file_header::{FileHeader, FileKind};
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::record::frame::Place;
use crate::record::poison::Poison;
use crate::record::scan::{Item, Order, RecordReader};
use crate::record::window::Source;
use crate::record::writer::{FrameWriter, Record, Sink};
use crate::vfs::{File, Fs, OpenMode};

const NAME: &str = "MANIFEST";
const TEMPORARY: &str = "MANIFEST.tmp";

/// The manifest, open for appending. Thread safe.
///
/// Locks, in the order in which they are taken together: `turn`, then `log`. Only a rewrite holds `log` during a sync.
#[derive(Debug)]
pub(crate) struct Manifest {
    fs: Arc<dyn Fs>,
    dir: PathBuf,
    /// Held by whoever syncs.
    turn: Mutex<()>,
    log: Mutex<Log>,
    poison: Poison,
}

#[derive(Debug)]
struct Log {
    file: Arc<dyn File>,
    place: Place,
    /// Where the next frame goes.
    end: u64,
    /// The last record written; the first of a file has 1.
    last: SeqNo,
    /// The last record known to be durable.
    durable: SeqNo,
    writer: FrameWriter,
}

/// What a manifest says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LoadedManifest {
    /// In the order in which they were written.
    pub(crate) edits: Vec<Edit>,
    /// Bytes up to the end of the last record.
    pub(crate) bytes: u64,
    /// Records that verify behind a torn one, if there are any.
    pub(crate) dropped_after_damage: Option<DroppedAfterDamage>,
}

impl Manifest {
    /// Writes a new manifest that begins with `edits`, and puts it in the place of the one there was, all at once and
    /// durably. `file_id` must be fresh random bytes.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace`; the old manifest is still there, unless the failure was the last step, making the new
    /// name durable: then either may be found.
    pub(crate) fn create(fs: Arc<dyn Fs>, dir: &Path, file_id: [u8; 16], edits: &[Edit]) -> Result<Manifest> {
        let log = Log::create(&*fs, dir, file_id, edits)?;
        rename(&*fs, dir)?;
        fs.sync_dir(dir)?;
        Ok(Manifest {
            fs,
            dir: dir.to_path_buf(),
            turn: Mutex::new(()),
            log: Mutex::new(log),
            poison: Poison::default(),
        })
    }

    /// Reads the manifest; writes nothing.
    ///
    /// # Errors
    /// `Io` with `os_kind` `NotFound` if there is none; `Corruption` with file and offset if what was durable is damaged;
    /// `Unsupported` if a newer version wrote it.
    pub(crate) fn load(fs: Arc<dyn Fs>, dir: &Path) -> Result<LoadedManifest> {
        let path = dir.join(NAME);
        let file = fs.open(&path, OpenMode::Read)?;
        let mut loaded = read(Source::File(&*file)).map_err(|e| e.in_file(&path))?;
        if let Some(dropped) = &mut loaded.dropped_after_damage {
            dropped.file = path;
        }
        Ok(loaded)
    }

    /// Appends edits that take effect together; they survive the death of the process, and power loss after
    /// [`Manifest::sync`].
    ///
    /// # Errors
    /// `OutOfSpace`: nothing was appended, a later call may succeed. `Poisoned` after any other failure, for ever.
    pub(crate) fn append(&self, edits: &[Edit]) -> Result<()> {
        self.poison.check()?;
        if edits.is_empty() {
            return Ok(());
        }
        let mut log = self.log();
        let end = log.end;
        log.append(edits).or_else(|error| {
            // Half a record may be there. It must not stay: a shorter record written over it would leave its tail.
            let undone = error.kind() == ErrorKind::OutOfSpace && log.file.set_length(end).is_ok();
            Err(if undone { error } else { self.poison.set(error) })
        })
    }

    /// Makes everything appended so far durable; does nothing if it is. Callers at the same time share one sync, and
    /// nobody who appends waits for it.
    ///
    /// # Errors
    /// `Poisoned` once a sync failed, for ever.
    pub(crate) fn sync(&self) -> Result<()> {
        self.poison.check()?;
        let wanted = self.log().last;
        let _turn = self.turn();
        self.poison.check()?;
        let (file, last) = {
            let log = self.log();
            if log.durable >= wanted || log.durable >= log.last {
                return Ok(());
            }
            (Arc::clone(&log.file), log.last)
        };
        file.sync_data().map_err(|e| self.poison.set(e))?;
        let mut log = self.log();
        log.durable = log.durable.max(last);
        log.note_durable();
        Ok(())
    }

    /// Appends edits and makes them durable.
    ///
    /// # Errors
    /// As [`Manifest::append`] and [`Manifest::sync`].
    pub(crate) fn commit(&self, edits: &[Edit]) -> Result<()> {
        self.append(edits)?;
        self.sync()
    }

    /// Replaces the manifest by a new one that says `live` and nothing else. The caller sees to it that no edit is
    /// appended between the moment that `live` describes and the return.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace`: the old one goes on. `Poisoned` if it is not known which of them power loss would leave.
    pub(crate) fn rewrite(&self, file_id: [u8; 16], live: &[Edit]) -> Result<()> {
        let _turn = self.turn();
        let mut log = self.log();
        self.poison.check()?;
        let new = Log::create(&*self.fs, &self.dir, file_id, live)?;
        rename(&*self.fs, &self.dir)?;
        *log = new;
        self.fs.sync_dir(&self.dir).map_err(|e| self.poison.set(e))
    }

    /// Length in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.log().end
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Gives the new manifest its name; where that fails, removes it.
fn rename(fs: &dyn Fs, dir: &Path) -> Result<()> {
    let temporary = dir.join(TEMPORARY);
    fs.rename(&temporary, &dir.join(NAME)).inspect_err(|_| drop(fs.remove_file(&temporary)))
}

impl Log {
    /// Writes and syncs a manifest under its temporary name.
    fn create(fs: &dyn Fs, dir: &Path, file_id: [u8; 16], edits: &[Edit]) -> Result<Log> {
        let path = dir.join(TEMPORARY);
        if fs.exists(&path)? {
            fs.remove_file(&path)?;
        }
        let file = fs.open(&path, OpenMode::Create)?;
        let place = Place { file_id, epoch: 0 };
        let end = FileHeader::LEN as u64;
        let (last, writer) = (SeqNo::ZERO, FrameWriter::new());
        let mut log = Log { file, place, end, last, durable: SeqNo::ZERO, writer };
        let mut fill = || {
            let header = FileHeader { kind: FileKind::Manifest, file_id };
            log.file.write_at(&header.encode(), 0)?;
            log.append(edits)?;
            // True by the time that anyone can find the file under its name.
            log.durable = log.last;
            log.write(|writer, place, last, durable, sink| writer.put_watermark(place, last, durable, sink))?;
            log.file.sync_data()
        };
        fill().inspect_err(|_| drop(fs.remove_file(&path)))?;
        Ok(log)
    }

    fn append(&mut self, edits: &[Edit]) -> Result<()> {
        let mut payload = Vec::new();
        for edit in edits {
            edit.encode(&mut payload);
        }
        let payload = payload.as_slice();
        let first = self.last.plus(1);
        self.write(|writer, place, _, durable, sink| {
            writer.put(place, &Record { first, count: 1, durable, payload }, sink)
        })?;
        self.last = first;
        Ok(())
    }

    /// Notes, unsynced, how far the manifest is durable. It only helps to tell damage from a torn tail; a failed attempt
    /// is written over by the next record, which is longer than a note.
    fn note_durable(&mut self) {
        let _ = self.write(|writer, place, last, durable, sink| writer.put_watermark(place, last, durable, sink));
    }

    fn write(
        &mut self,
        put: impl FnOnce(&mut FrameWriter, &Place, SeqNo, SeqNo, &mut Sink<'_>) -> Result<()>,
    ) -> Result<()> {
        self.writer.begin(self.end);
        let file = &self.file;
        let mut sink = |bytes: &[u8], offset: u64| file.write_at(bytes, offset);
        put(&mut self.writer, &self.place, self.last, self.durable, &mut sink)?;
        self.writer.flush(&mut sink)?;
        self.end = self.writer.position();
        Ok(())
    }
}

/// Reads a manifest from memory, for inspection and fuzzing.
///
/// # Errors
/// As [`Manifest::load`], without the name of a file.
pub(crate) fn decode(bytes: &[u8]) -> Result<LoadedManifest> {
    read(Source::Bytes(bytes))
}

fn read(source: Source<'_>) -> Result<LoadedManifest> {
    let mut head = [0; FileHeader::LEN];
    let len = match source {
        Source::File(file) => file.read_at(&mut head, 0)?,
        Source::Bytes(bytes) => {
            let len = bytes.len().min(head.len());
            head[..len].copy_from_slice(&bytes[..len]);
            len
        }
    };
    let file_id = FileHeader::decode(FileKind::Manifest, &head[..len])?.file_id;
    let place = Place { file_id, epoch: 0 };
    let mut reader = RecordReader::new(source, place, FileHeader::LEN as u64, SeqNo::ZERO, Order::Consecutive)?;
    let mut edits = Vec::new();
    loop {
        let at = reader.position();
        match reader.next()? {
            Item::Record(_) => {
                edits.append(&mut Edit::decode_batch(reader.payload()?).map_err(|e| e.at_offset(at))?);
            }
            Item::Watermark(_) => {}
            Item::Stop => break,
        }
    }
    let (bytes, offset, expected) = (reader.end(), reader.position(), reader.last().0 + 1);
    let behind = reader.search()?;
    // The first record was synced before the file got its name.
    if behind.durable.0.max(1) >= expected {
        let message = format!("manifest is damaged: record {expected} cannot be read, though it was synced");
        return Err(Error::corruption(message).at_offset(offset));
    }
    let dropped = DroppedAfterDamage { file: PathBuf::new(), offset, frames: behind.frames };
    Ok(LoadedManifest { edits, bytes, dropped_after_damage: (behind.frames > 0).then_some(dropped) })
}
