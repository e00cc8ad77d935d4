//! A file or a directory in its two states, live and synced, with the pending changes between them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::testing::mem_fs::content::{FileContent, PAGE, split_at_boundaries};

/// Number of a file or directory. It is never reused.
pub(crate) type Ino = u64;

/// A file or a directory.
#[derive(Clone, Debug)]
pub(crate) enum Inode {
    File(FileNode),
    Dir(DirNode),
}

/// One unsynced change of a file.
#[derive(Clone, Debug)]
pub(crate) enum FileOp {
    /// Bytes were stored, by a write or through a mapping. `len` is the length of the file afterwards.
    Store { offset: u64, bytes: Arc<[u8]>, mapped: bool, len: u64 },
    /// The length was set, which also discards the bytes after it.
    Length(u64),
}

impl FileOp {
    /// Approximate memory use in bytes.
    fn weight(&self) -> u64 {
        let bytes = if let FileOp::Store { bytes, .. } = self { bytes.len() as u64 } else { 0 };
        OP_WEIGHT + bytes
    }
}

/// A file.
#[derive(Clone, Debug, Default)]
pub(crate) struct FileNode {
    pub(crate) live: FileContent,
    pub(crate) synced: FileContent,
    pub(crate) pending: Vec<FileOp>,
    /// Whether `live` has changes that are not in `pending` and that no sync makes durable.
    pub(crate) has_lost_writes: bool,
    /// Approximate memory use of `pending` in bytes.
    weight: u64,
}

/// Approximate memory use of an operation without its bytes, in bytes.
const OP_WEIGHT: u64 = 64;

/// The pending changes are squashed once their weight exceeds twice the length of the file plus this many bytes.
const FREE_WEIGHT: u64 = 1 << 20;

impl FileNode {
    /// A file whose live state is synced.
    pub(crate) fn new_synced(content: FileContent) -> FileNode {
        FileNode { live: content.clone(), synced: content, ..FileNode::default() }
    }

    /// Stores bytes, growing the file if needed.
    pub(crate) fn store(&mut self, bytes: &[u8], offset: u64, mapped: bool) {
        let len = self.live.length().max(offset + bytes.len() as u64);
        self.live.store(bytes, offset);
        self.live.set_length(len);
        self.push(FileOp::Store { offset, bytes: bytes.into(), mapped, len });
    }

    /// Truncates, or grows with zeros.
    pub(crate) fn set_length(&mut self, len: u64) {
        if len != self.live.length() {
            self.live.set_length(len);
            self.push(FileOp::Length(len));
        }
    }

    /// Makes bytes and length durable.
    pub(crate) fn sync(&mut self) {
        if self.has_lost_writes {
            for op in &self.pending {
                match op {
                    FileOp::Length(len) => self.synced.set_length(*len),
                    FileOp::Store { offset, bytes, .. } => {
                        let len = self.synced.length().max(offset + bytes.len() as u64);
                        self.synced.store(bytes, *offset);
                        self.synced.set_length(len);
                    }
                }
            }
        } else if !self.pending.is_empty() {
            self.synced = self.live.clone();
        }
        self.pending.clear();
        self.weight = 0;
    }

    /// Forgets the pending changes: reads return them until the power fails, but no sync makes them durable.
    pub(crate) fn lose_pending(&mut self) {
        self.has_lost_writes |= !self.pending.is_empty();
        self.pending.clear();
        self.weight = 0;
    }

    fn push(&mut self, op: FileOp) {
        self.weight += op.weight();
        self.pending.push(op);
        if self.weight > 2 * self.live.length() + FREE_WEIGHT {
            self.squash();
        }
    }

    /// Replaces the pending changes by one store for each changed page, so that a file that is often overwritten and
    /// never synced uses bounded memory. Afterwards fewer states can result from a crash, and no additional ones.
    fn squash(&mut self) {
        let (mut pages, mut any_mapped, mut shortest) = (BTreeSet::new(), false, self.synced.length());
        for op in &self.pending {
            match op {
                FileOp::Length(len) => shortest = shortest.min(*len),
                FileOp::Store { offset, bytes, mapped, .. } => {
                    any_mapped |= mapped;
                    split_at_boundaries(*offset, bytes.len(), PAGE as u64, |at, _| _ = pages.insert(at / PAGE as u64));
                }
            }
        }
        let mut len = shortest;
        let mut ops = if shortest < self.synced.length() { vec![FileOp::Length(shortest)] } else { Vec::new() };
        for page in pages {
            let (offset, mut bytes) = (page * PAGE as u64, [0; PAGE]);
            let count = self.live.read(&mut bytes, offset);
            if count > 0 {
                len = len.max(offset + count as u64);
                ops.push(FileOp::Store { offset, bytes: bytes[..count].into(), mapped: any_mapped, len });
            }
        }
        if len != self.live.length() {
            ops.push(FileOp::Length(self.live.length()));
        }
        self.weight = ops.iter().map(FileOp::weight).sum();
        self.pending = ops;
    }
}

/// One unsynced change of a directory: a name is set to a target, or removed.
#[derive(Clone, Debug)]
pub(crate) struct DirEntryOp {
    pub(crate) name: String,
    pub(crate) target: Option<Ino>,
    /// Changes of one group survive together or not at all (the two halves of a rename of a directory).
    pub(crate) group: Option<u64>,
    /// The other half of the group is already durable, so this half must survive.
    pub(crate) must_survive: bool,
}

/// A directory.
#[derive(Clone, Debug, Default)]
pub(crate) struct DirNode {
    pub(crate) live: BTreeMap<String, Ino>,
    pub(crate) synced: BTreeMap<String, Ino>,
    pub(crate) pending: Vec<DirEntryOp>,
}

impl DirNode {
    /// Points a name at `target`, or removes it.
    pub(crate) fn set(&mut self, name: &str, target: Option<Ino>, group: Option<u64>) {
        let op = DirEntryOp { name: name.to_owned(), target, group, must_survive: false };
        op.apply(&mut self.live);
        self.pending.push(op);
    }

    /// Makes the names durable. Returns the groups whose other half must now survive a crash.
    pub(crate) fn sync(&mut self) -> Vec<u64> {
        self.pending.iter().for_each(|op| op.apply(&mut self.synced));
        self.pending.drain(..).filter_map(|op| op.group).collect()
    }
}

impl DirEntryOp {
    pub(crate) fn apply(&self, names: &mut BTreeMap<String, Ino>) {
        match self.target {
            Some(ino) => names.insert(self.name.clone(), ino),
            None => names.remove(&self.name),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(content: &FileContent) -> Vec<u8> {
        let mut buf = vec![0; content.length() as usize];
        content.read(&mut buf, 0);
        buf
    }

    /// The synced state with every pending change applied.
    fn apply_pending(file: &FileNode) -> FileContent {
        let mut content = file.synced.clone();
        for op in &file.pending {
            match op {
                FileOp::Length(len) => content.set_length(*len),
                FileOp::Store { offset, bytes, len, .. } => {
                    content.store(bytes, *offset);
                    content.set_length(*len);
                }
            }
        }
        content
    }

    #[test]
    fn pending_changes_are_bounded_and_reach_live() {
        let mut rng = crate::testing::seeded_rng::SeededRng::new(5);
        let mut file = FileNode::default();
        file.set_length(300_000);
        file.store(&[9; 200_000], 0, false);
        file.sync();
        let mut squashed = 0;
        for round in 0..4_000u32 {
            let before = file.pending.len();
            match rng.below(40) {
                0 => file.set_length(rng.below(400_000) as u64),
                _ => file.store(&vec![round as u8; rng.below(3_000)], rng.below(300_000) as u64, rng.chance_in_8(4)),
            }
            squashed += usize::from(file.pending.len() < before);
            assert!(file.weight <= 2 * file.live.length() + FREE_WEIGHT + 4_096);
            if round % 100 == 0 || file.pending.len() < before {
                assert!(bytes(&apply_pending(&file)) == bytes(&file.live), "round {round}");
            }
        }
        assert!(squashed > 1, "never squashed");
        file.sync();
        assert!(file.pending.is_empty() && bytes(&file.synced) == bytes(&file.live));
    }

    #[test]
    fn setting_the_same_length_changes_nothing() {
        let mut file = FileNode::default();
        file.set_length(5);
        file.set_length(5);
        assert_eq!(file.pending.len(), 1);
    }

    #[test]
    fn names_become_durable_by_a_sync() {
        let mut dir = DirNode::default();
        dir.set("a", Some(2), None);
        dir.set("b", Some(3), Some(8));
        dir.set("a", None, None);
        assert!(dir.synced.is_empty());
        assert_eq!(dir.sync(), [8]);
        assert_eq!(dir.synced, BTreeMap::from([("b".to_owned(), 3)]));
        assert_eq!(dir.live, dir.synced);
    }
}
