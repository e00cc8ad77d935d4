//! The state after a power failure: the synced state and a chosen part of the pending changes.
//!
//! A real system may lose less: a journal keeps the order of names, and a page is written back as a whole. This model
//! loses more, so code that tolerates its crashes tolerates those of a real system.

use std::collections::BTreeMap;

use crate::testing::mem_fs::content::{PAGE, split_at_boundaries};
use crate::testing::mem_fs::inode::{DirNode, FileNode, FileOp, Ino, Inode};
use crate::testing::seeded_rng::SeededRng;

/// Which unsynced changes survive [`MemFs::crash`](crate::testing::MemFs::crash). Synced changes always survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Survival {
    /// No change survives: the result is exactly the synced state.
    Nothing,
    /// Every change survives, as after a crash of the process alone.
    Everything,
    /// A part that the seed chooses. Each write survives, is lost, or loses any of its 4 KiB pages or 512-byte
    /// sectors; a store through a mapping may also end at any byte. Lengths and directory entries survive
    /// independently of each other and of the bytes. A rename of a file changes two entries, which survive
    /// independently. A rename of a directory survives completely or not at all.
    Random,
    /// All bytes within the synced length of files survive, but no new length and no new, changed or removed name.
    DataOnly,
    /// All lengths and names survive, but no bytes: a new file has its length and contains zeros.
    MetadataOnly,
}

/// Sector size in bytes. The device writes a sector completely or not at all.
const SECTOR: usize = 512;

/// Returns the state of one file or directory after the power failure.
pub(crate) fn state_after_crash(inode: &Inode, ino: Ino, survival: Survival, seed: u64) -> Inode {
    let mut rng = SeededRng::with_stream(seed, ino);
    match inode {
        Inode::File(file) => Inode::File(surviving_file(file, survival, &mut rng)),
        Inode::Dir(dir) => {
            let names = surviving_names(dir, survival, seed, &mut rng);
            Inode::Dir(DirNode { live: names.clone(), synced: names, pending: Vec::new() })
        }
    }
}

/// Selects the elements of a list that survive. Independent random bits would rarely lose exactly one of a hundred
/// elements, or keep exactly a prefix, although these cases find the majority of bugs.
enum SurvivalPattern {
    None,
    All,
    First(usize),
    Last(usize),
    Only(usize),
    AllBut(usize),
    Random(usize),
}

impl SurvivalPattern {
    fn draw(rng: &mut SeededRng, count: usize) -> SurvivalPattern {
        match rng.below(8) {
            0 => SurvivalPattern::None,
            1 => SurvivalPattern::All,
            2 => SurvivalPattern::First(rng.below(count + 1)),
            3 => SurvivalPattern::Last(rng.below(count + 1)),
            4 => SurvivalPattern::Only(rng.below(count)),
            5 => SurvivalPattern::AllBut(rng.below(count)),
            _ => SurvivalPattern::Random(1 + rng.below(7)),
        }
    }

    fn keeps(&self, index: usize, count: usize, rng: &mut SeededRng) -> bool {
        match *self {
            SurvivalPattern::None => false,
            SurvivalPattern::All => true,
            SurvivalPattern::First(n) => index < n,
            SurvivalPattern::Last(n) => index + n >= count,
            SurvivalPattern::Only(n) => index == n,
            SurvivalPattern::AllBut(n) => index != n,
            SurvivalPattern::Random(hits) => rng.chance_in_8(hits),
        }
    }
}

fn surviving_file(file: &FileNode, survival: Survival, rng: &mut SeededRng) -> FileNode {
    if survival == Survival::Everything {
        let mut file = file.clone();
        file.sync();
        return file;
    }
    let mut content = file.synced.clone();
    let count = file.pending.len();
    let pattern = SurvivalPattern::draw(rng, count);
    for (index, op) in file.pending.iter().enumerate() {
        let survives = match survival {
            Survival::Nothing | Survival::Everything => false,
            Survival::Random => pattern.keeps(index, count, rng),
            Survival::DataOnly => matches!(op, FileOp::Store { .. }),
            Survival::MetadataOnly => matches!(op, FileOp::Length(_)),
        };
        match op {
            FileOp::Length(len) if survives => content.discard_from(*len),
            FileOp::Store { offset, bytes, mapped, .. } if survives => {
                let torn = survival == Survival::Random;
                store_part(bytes, *offset, *mapped, torn, rng, |bytes, offset| content.store(bytes, offset));
            }
            _ => {}
        }
    }
    let len = match survival {
        Survival::Nothing | Survival::DataOnly => file.synced.length(),
        Survival::Everything | Survival::MetadataOnly => file.live.length(),
        Survival::Random => surviving_length(file, rng),
    };
    content.discard_from(len);
    content.set_length(len);
    FileNode::new_synced(content)
}

/// Calls `store` with the surviving parts of one store that was not lost completely.
fn store_part(
    bytes: &[u8],
    offset: u64,
    mapped: bool,
    torn: bool,
    rng: &mut SeededRng,
    mut store: impl FnMut(&[u8], u64),
) {
    let unit = match if torn { rng.below(if mapped { 5 } else { 4 }) } else { 0 } {
        2 => PAGE,
        3 => SECTOR,
        4 => return store(&bytes[..rng.below(bytes.len())], offset),
        _ => return store(bytes, offset),
    };
    let mut count = 0;
    split_at_boundaries(offset, bytes.len(), unit as u64, |_, _| count += 1);
    let pattern = SurvivalPattern::draw(rng, count);
    let mut index = 0;
    split_at_boundaries(offset, bytes.len(), unit as u64, |at, range| {
        if pattern.keeps(index, count, rng) {
            store(&bytes[range], at);
        }
        index += 1;
    });
}

/// Chooses the synced length, the last length, or any length between them.
fn surviving_length(file: &FileNode, rng: &mut SeededRng) -> u64 {
    let choices = match rng.below(3) {
        0 => 0,
        1 => file.pending.len(),
        _ => rng.below(file.pending.len() + 1),
    };
    match choices.checked_sub(1).map(|last| &file.pending[last]) {
        None => file.synced.length(),
        Some(FileOp::Length(len) | FileOp::Store { len, .. }) => *len,
    }
}

fn surviving_names(dir: &DirNode, survival: Survival, seed: u64, rng: &mut SeededRng) -> BTreeMap<String, Ino> {
    let mut names = dir.synced.clone();
    let count = dir.pending.len();
    let pattern = SurvivalPattern::draw(rng, count);
    for (index, op) in dir.pending.iter().enumerate() {
        let survives = match (survival, op.group) {
            (Survival::Everything | Survival::MetadataOnly, _) => true,
            (Survival::Nothing | Survival::DataOnly, _) => op.must_survive,
            // Both halves of the group use the same random number.
            (Survival::Random, Some(group)) => op.must_survive || SeededRng::with_stream(seed, !group).chance_in_8(4),
            (Survival::Random, None) => pattern.keeps(index, count, rng),
        };
        if survives {
            op.apply(&mut names);
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn crashed(file: &FileNode, survival: Survival, seed: u64) -> Vec<u8> {
        let Inode::File(after) = state_after_crash(&Inode::File(file.clone()), 5, survival, seed) else {
            panic!("a file")
        };
        assert!(after.pending.is_empty());
        let mut bytes = vec![0; after.live.length() as usize];
        after.live.read(&mut bytes, 0);
        bytes
    }

    #[test]
    fn every_subset_of_a_few_things_is_drawn() {
        let mut seen = BTreeSet::new();
        for seed in 0..400 {
            let mut rng = SeededRng::new(seed);
            let pattern = SurvivalPattern::draw(&mut rng, 3);
            seen.insert([0, 1, 2].map(|index| pattern.keeps(index, 3, &mut rng)));
        }
        assert_eq!(seen.len(), 8);
    }

    #[test]
    fn deterministic_modes_keep_documented_state() {
        let mut file = FileNode::default();
        file.store(b"old old", 0, false);
        file.sync();
        file.store(b"NEW", 4, false);
        file.store(b"grown", 7, false);
        for seed in 0..20 {
            assert_eq!(crashed(&file, Survival::Nothing, seed), b"old old");
            assert_eq!(crashed(&file, Survival::Everything, seed), b"old NEWgrown");
            assert_eq!(crashed(&file, Survival::DataOnly, seed), b"old NEW");
            assert_eq!(crashed(&file, Survival::MetadataOnly, seed), b"old old\0\0\0\0\0");
        }
    }

    #[test]
    fn length_and_bytes_survive_independently() {
        let mut file = FileNode::default();
        file.store(b"ab", 0, false);
        let seen: BTreeSet<_> = (0..300).map(|seed| crashed(&file, Survival::Random, seed)).collect();
        assert_eq!(seen, BTreeSet::from([b"".to_vec(), b"\0\0".to_vec(), b"ab".to_vec()]));
    }

    #[test]
    fn truncate_may_be_lost_and_leaves_zeros() {
        let mut file = FileNode::default();
        file.store(b"abcd", 0, false);
        file.sync();
        file.set_length(2);
        let seen: BTreeSet<_> = (0..300).map(|seed| crashed(&file, Survival::Random, seed)).collect();
        assert_eq!(seen, BTreeSet::from([b"ab".to_vec(), b"ab\0\0".to_vec(), b"abcd".to_vec()]));
    }

    #[test]
    fn writes_tear_at_sectors_and_stores_at_bytes() {
        let torn_at = |mapped| {
            let mut file = FileNode::default();
            file.set_length(3 * PAGE as u64);
            file.sync();
            file.store(&[1; 2 * PAGE], 100, mapped);
            let mut borders = BTreeSet::new();
            for seed in 0..600 {
                let bytes = crashed(&file, Survival::Random, seed);
                borders.extend((101..bytes.len()).filter(|i| bytes[*i] != bytes[i - 1]));
            }
            borders.remove(&(100 + 2 * PAGE));
            borders
        };
        let written = torn_at(false);
        assert!(written.iter().all(|at| at % SECTOR == 0) && written.contains(&PAGE), "{written:?}");
        assert_eq!(written.len(), 2 * PAGE / SECTOR, "not at every sector");
        assert!(torn_at(true).iter().any(|at| at % SECTOR != 0));
    }

    #[test]
    fn the_same_seed_gives_the_same_crash() {
        let mut file = FileNode::default();
        (0..50).for_each(|i| file.store(&[i as u8; 300], i * 250, i % 2 == 0));
        for seed in 0..50 {
            assert_eq!(crashed(&file, Survival::Random, seed), crashed(&file, Survival::Random, seed));
        }
    }
}
