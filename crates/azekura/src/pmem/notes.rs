//! What a pool that is durable by itself says about the numbers in it, and whether it was closed: words of its header.

use crate::base::checksum::{place_seed, xxh3};
use crate::base::{Error, Result, SeqNo};
use crate::mem::region::{PAGE, Region};
use crate::pmem::medium::{Medium, Site};
use crate::pmem::tree::Tree;

/// A note.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Note {
    /// All that the log has for this pool through that number is in it.
    Applied,
    /// No number from there on was ever used in it.
    NumbersEnd,
}

impl Note {
    fn at(self) -> u64 {
        match self {
            Note::Applied => 64,
            Note::NumbersEnd => 72,
        }
    }
}

/// Sequence numbers have 56 bits; above them stands a check.
const CHECK_SHIFT: u32 = 56;

fn word_of(file_id: &[u8; 16], note: Note, seqno: SeqNo) -> u64 {
    let check = xxh3(place_seed(file_id, note.at()), &seqno.0.to_le_bytes());
    check << CHECK_SHIFT | seqno.0
}

/// What was noted last in the pool in `region`, 0 if nothing was.
///
/// # Errors
/// `Corruption` if the note does not verify.
pub(crate) fn noted(region: &Region, file_id: &[u8; 16], note: Note) -> Result<SeqNo> {
    let word = region.load(note.at());
    let seqno = SeqNo(word & ((1 << CHECK_SHIFT) - 1));
    if word != 0 && word_of(file_id, note, seqno) != word {
        return Err(Error::corruption("check of a note in the pool's header does not match").at_offset(note.at()));
    }
    Ok(seqno)
}

/// Where it stands that nothing was changed since the pool was closed: a checksum of what else the header says and of
/// the length of the pool, so that none that was left from another time is taken for it. 0: it is open, or was left so.
const CLOSED_AT: u64 = 80;

fn closed_word(region: &Region, file_id: &[u8; 16]) -> u64 {
    let words = [region.load(Note::Applied.at()), region.load(Note::NumbersEnd.at()), region.len()];
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    xxh3(place_seed(file_id, CLOSED_AT), &bytes).max(1)
}

/// Whether the pool in `region` was closed, and is as it was then.
pub(crate) fn is_closed(region: &Region, file_id: &[u8; 16]) -> bool {
    region.contains(0, PAGE) && region.load(CLOSED_AT) == closed_word(region, file_id)
}

impl<M: Medium> Tree<M> {
    /// Notes that the pool is closed, durably when it returns: nothing is changed any more, and all that was is
    /// durable.
    pub(crate) fn note_closed(&self) {
        self.medium.publish(CLOSED_AT, closed_word(self.region(), &self.file_id));
        self.medium.flush(CLOSED_AT, 8, Site::ClosedWord);
        self.medium.fence(Site::ClosedDone);
    }

    /// Takes that back, durably when it returns: now it may be changed.
    pub(crate) fn note_open(&self) {
        if self.region().load(CLOSED_AT) != 0 {
            self.medium.publish(CLOSED_AT, 0);
            self.medium.flush(CLOSED_AT, 8, Site::OpenedWord);
            self.medium.fence(Site::OpenedDone);
        }
    }

    /// Notes `seqno`, durably when it returns.
    pub(crate) fn note(&self, note: Note, seqno: SeqNo) {
        self.medium.publish(note.at(), word_of(&self.file_id, note, seqno));
        self.medium.flush(note.at(), 8, Site::NoteWord);
        self.medium.fence(Site::NoteDone);
    }
}
