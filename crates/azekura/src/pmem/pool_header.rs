//! What a pool that is durable by itself says about the numbers in it, and whether it was closed: words of its header.

use crate::base::checksum::{location_seed, xxh3};
use crate::base::{Error, Result, SeqNo};
use crate::mem::region::{PAGE, Region};
use crate::pmem::persistence::{PersistSite, PersistenceBackend};
use crate::pmem::tree::PoolTree;

/// A note.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PoolSeqnoField {
    /// All that the log has for this pool through that number is in it.
    AppliedThrough,
    /// No number from there on was ever used in it.
    SeqnoEnd,
}

impl PoolSeqnoField {
    fn offset(self) -> u64 {
        match self {
            PoolSeqnoField::AppliedThrough => 64,
            PoolSeqnoField::SeqnoEnd => 72,
        }
    }
}

/// Sequence numbers have 56 bits; above them stands a check.
const CHECK_SHIFT: u32 = 56;

fn encode_seqno_word(file_id: &[u8; 16], note: PoolSeqnoField, seqno: SeqNo) -> u64 {
    let check = xxh3(location_seed(file_id, note.offset()), &seqno.0.to_le_bytes());
    check << CHECK_SHIFT | seqno.0
}

/// What was noted last in the pool in `region`, 0 if nothing was.
///
/// # Errors
/// `Corruption` if the note does not verify.
pub(crate) fn read_seqno_field(region: &Region, file_id: &[u8; 16], note: PoolSeqnoField) -> Result<SeqNo> {
    let word = region.load(note.offset());
    let seqno = SeqNo(word & ((1 << CHECK_SHIFT) - 1));
    if word != 0 && encode_seqno_word(file_id, note, seqno) != word {
        return Err(Error::corruption("check of a note in the pool's header does not match").at_offset(note.offset()));
    }
    Ok(seqno)
}

/// Where it stands that nothing was changed since the pool was closed: a checksum of what else the header says and of
/// the length of the pool, so that none that was left from another time is taken for it. 0: it is open, or was left so.
const CLEAN_SHUTDOWN_AT: u64 = 80;

fn clean_shutdown_word(region: &Region, file_id: &[u8; 16]) -> u64 {
    let words = [
        region.load(PoolSeqnoField::AppliedThrough.offset()),
        region.load(PoolSeqnoField::SeqnoEnd.offset()),
        region.len(),
    ];
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    xxh3(location_seed(file_id, CLEAN_SHUTDOWN_AT), &bytes).max(1)
}

/// Whether the pool in `region` was closed, and is as it was then.
pub(crate) fn has_clean_shutdown_mark(region: &Region, file_id: &[u8; 16]) -> bool {
    region.contains(0, PAGE) && region.load(CLEAN_SHUTDOWN_AT) == clean_shutdown_word(region, file_id)
}

impl<M: PersistenceBackend> PoolTree<M> {
    /// Notes that the pool is closed, durably when it returns: nothing is changed any more, and all that was is
    /// durable.
    pub(crate) fn set_clean_shutdown_mark(&self) {
        self.backend.publish(CLEAN_SHUTDOWN_AT, clean_shutdown_word(self.region(), &self.file_id));
        self.backend.flush(CLEAN_SHUTDOWN_AT, 8, PersistSite::SetCleanMarkWord);
        self.backend.fence(PersistSite::SetCleanMarkDone);
    }

    /// Takes that back, durably when it returns: now it may be changed.
    pub(crate) fn clear_clean_shutdown_mark(&self) {
        if self.region().load(CLEAN_SHUTDOWN_AT) != 0 {
            self.backend.publish(CLEAN_SHUTDOWN_AT, 0);
            self.backend.flush(CLEAN_SHUTDOWN_AT, 8, PersistSite::ClearCleanMarkWord);
            self.backend.fence(PersistSite::ClearCleanMarkDone);
        }
    }

    /// Notes `seqno`, durably when it returns.
    pub(crate) fn write_seqno_field(&self, note: PoolSeqnoField, seqno: SeqNo) {
        self.backend.publish(note.offset(), encode_seqno_word(&self.file_id, note, seqno));
        self.backend.flush(note.offset(), 8, PersistSite::SeqnoFieldWord);
        self.backend.fence(PersistSite::SeqnoFieldDone);
    }
}
