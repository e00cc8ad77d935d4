//! Memory taken for persistent: files in it are said to survive power loss, so that whoever uses them as memory flushes
//! and fences every store that has to be persistent, by the processor's own instructions. That costs what it does on
//! such memory, but for the speed of the memory itself.

use crate::experiment::fs::through::{ThroughFs, Watch};
use azekura::fs::DiskFs;
use std::path::Path;
use std::sync::Arc;

/// Watches nothing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Nobody;

impl Watch for Nobody {
    type Known = ();

    fn opened(&self, _path: &Path) {}

    fn read(&self, _file: (), _offset: u64, _bytes: u64) {}

    fn wrote(&self, _file: (), _bytes: u64) {}
}

/// The machine's file system, all of it taken for persistent memory.
pub(crate) fn persistent() -> ThroughFs<Nobody> {
    ThroughFs::taken_for_persistent(Arc::new(DiskFs::new()), Nobody)
}

#[cfg(test)]
mod tests {
    use super::persistent;
    use azekura::PersistenceLevel;
    use azekura::fs::{Fs, OpenMode};
    use std::sync::atomic::Ordering;

    #[test]
    fn files_are_memory_that_survives_power_loss() {
        let dir = tempfile::tempdir().unwrap();
        let fs = persistent();
        assert_eq!(fs.memory_level(dir.path()), PersistenceLevel::Power);
        let file = fs.open(&dir.path().join("some"), OpenMode::Create).unwrap();
        file.allocate(4096).unwrap();
        let words = file.map_words(1 << 20).unwrap().unwrap();
        assert!(words.survives_power_loss() && words.words().len() == 1 << 17);
        words.words()[1].store(u64::from_le_bytes(*b"8 bytes."), Ordering::Relaxed);
        assert_eq!(std::fs::read(dir.path().join("some")).unwrap()[8..16], *b"8 bytes.");
    }
}
