//! The readers of changes, for which segments of the write-ahead log (WAL) are kept.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use crate::base::SeqNo;
use crate::base::sync::lock;

/// The readers of changes of a database. Thread safe.
#[derive(Default)]
pub(crate) struct ChangeReaders {
    readers: Mutex<Vec<Weak<ChangeReader>>>,
}

/// One reader of changes. Registered until it is dropped. Thread safe.
pub(crate) struct ChangeReader {
    name: Mutex<String>,
    /// The last sequence number that the reader does not need any more.
    read_through: AtomicU64,
}

impl ChangeReaders {
    /// Registers a reader that needs the commits after `read_through`.
    pub(crate) fn register(&self, read_through: SeqNo) -> Arc<ChangeReader> {
        let reader = ChangeReader { name: Mutex::default(), read_through: AtomicU64::new(read_through.0) };
        let reader = Arc::new(reader);
        let mut readers = lock(&self.readers);
        readers.retain(|reader| reader.strong_count() > 0);
        readers.push(Arc::downgrade(&reader));
        reader
    }

    /// All readers, in the order of their registration.
    pub(crate) fn all(&self) -> Vec<Arc<ChangeReader>> {
        lock(&self.readers).iter().filter_map(Weak::upgrade).collect()
    }

    /// The sequence number through which all readers have read; `None` without readers.
    pub(crate) fn read_through(&self) -> Option<SeqNo> {
        self.all().iter().map(|reader| reader.read_through()).min()
    }
}

impl ChangeReader {
    pub(crate) fn name(&self) -> String {
        lock(&self.name).clone()
    }

    pub(crate) fn set_name(&self, name: &str) {
        name.clone_into(&mut lock(&self.name));
    }

    pub(crate) fn read_through(&self) -> SeqNo {
        SeqNo(self.read_through.load(Ordering::Relaxed))
    }

    /// Records that the commits through `seqno` are not needed any more.
    pub(crate) fn note_read(&self, seqno: SeqNo) {
        self.read_through.fetch_max(seqno.0, Ordering::Relaxed);
    }
}
