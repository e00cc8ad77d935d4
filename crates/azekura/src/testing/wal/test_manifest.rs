//! A small manifest that records the callbacks of the WAL: only the part of a manifest that the WAL relies on.
//!
//! The file contains entries of 32 bytes, each with a checksum that includes its position. The first entry that does
//! not verify ends the file.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::base::checksum::xxh3;
use crate::base::sync::lock;
use crate::base::version_edit::{FileNumber, WalEpoch};
use crate::base::{ErrorKind, Result, SeqNo};
use crate::record_log::writer::LogPoison;
use crate::vfs::{File, Fs, OpenMode};

const ENTRY_LEN: usize = 32;

/// An edit of the test manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TestManifestEdit {
    SegmentAdded(WalEpoch, FileNumber),
    SegmentRetired(WalEpoch),
    WalEnd(WalEpoch, SeqNo),
}

impl TestManifestEdit {
    fn encode(self, seed: u64) -> [u8; ENTRY_LEN] {
        let (kind, epoch, number) = match self {
            TestManifestEdit::SegmentAdded(epoch, file) => (1u64, epoch, file.0),
            TestManifestEdit::SegmentRetired(epoch) => (2, epoch, 0),
            TestManifestEdit::WalEnd(epoch, seqno) => (3, epoch, seqno.0),
        };
        let mut entry = [0; ENTRY_LEN];
        entry[8..16].copy_from_slice(&kind.to_le_bytes());
        entry[16..24].copy_from_slice(&u64::from(epoch.0).to_le_bytes());
        entry[24..].copy_from_slice(&number.to_le_bytes());
        let sum = xxh3(seed, &entry[8..]);
        entry[..8].copy_from_slice(&sum.to_le_bytes());
        entry
    }

    fn decode(entry: &[u8], seed: u64) -> Option<TestManifestEdit> {
        let word = |at: usize| u64::from_le_bytes(entry[at..at + 8].try_into().unwrap());
        let epoch = WalEpoch(word(16) as u32);
        match word(8) {
            _ if word(0) != xxh3(seed, &entry[8..]) => None,
            1 => Some(TestManifestEdit::SegmentAdded(epoch, FileNumber(word(24)))),
            2 => Some(TestManifestEdit::SegmentRetired(epoch)),
            _ => Some(TestManifestEdit::WalEnd(epoch, SeqNo(word(24)))),
        }
    }
}

/// The file, open for writing. Thread safe.
pub(crate) struct TestManifest {
    state: Mutex<TestManifestFile>,
    poison: LogPoison,
}

struct TestManifestFile {
    file: Arc<dyn File>,
    entries: u64,
    unsynced: bool,
}

impl TestManifest {
    fn path(dir: &Path) -> PathBuf {
        dir.join("MANIFEST")
    }

    /// Atomically replaces the file with a durable one that contains `notes`.
    pub(crate) fn create(fs: &Arc<dyn Fs>, dir: &Path, notes: &[TestManifestEdit]) -> Result<TestManifest> {
        let temporary = dir.join("MANIFEST.tmp");
        if fs.exists(&temporary)? {
            fs.remove_file(&temporary)?;
        }
        let state = TestManifestFile { file: fs.open(&temporary, OpenMode::Create)?, entries: 0, unsynced: false };
        let recorder = TestManifest { state: Mutex::new(state), poison: LogPoison::default() };
        recorder.append(notes)?;
        recorder.sync()?;
        fs.rename(&temporary, &TestManifest::path(dir))?;
        fs.sync_dir(dir)?;
        Ok(recorder)
    }

    /// The valid entries; none if there is no file.
    pub(crate) fn load(fs: &Arc<dyn Fs>, dir: &Path) -> Result<Vec<TestManifestEdit>> {
        let path = TestManifest::path(dir);
        if !fs.exists(&path)? {
            return Ok(Vec::new());
        }
        let file = fs.open(&path, OpenMode::Read)?;
        let mut bytes = vec![0; file.length()? as usize];
        file.read_exact_at(&mut bytes, 0)?;
        Ok((0..)
            .zip(bytes.chunks_exact(ENTRY_LEN))
            .map_while(|(at, entry)| TestManifestEdit::decode(entry, at))
            .collect())
    }

    pub(crate) fn append(&self, notes: &[TestManifestEdit]) -> Result<()> {
        self.poison.check()?;
        let mut state = lock(&self.state);
        for note in notes {
            let at = state.entries;
            let written = state.file.write_at(&note.encode(at), at * ENTRY_LEN as u64);
            written.map_err(|error| match error.kind() {
                ErrorKind::OutOfSpace => error, // the next entry overwrites it
                _ => self.poison.set(error),
            })?;
            (state.entries, state.unsynced) = (at + 1, true);
        }
        Ok(())
    }

    /// Makes the appended entries durable, if they are not durable yet.
    pub(crate) fn sync(&self) -> Result<()> {
        self.poison.check()?;
        let mut state = lock(&self.state);
        if std::mem::take(&mut state.unsynced) {
            state.file.sync_data().map_err(|error| self.poison.set(error))?;
        }
        Ok(())
    }
}
