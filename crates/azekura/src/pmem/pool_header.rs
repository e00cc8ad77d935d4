//! Words in the header of a mapped pool: sequence numbers, and the mark of a clean shutdown.

use crate::base::checksum::{location_seed, xxh3};
use crate::base::{Error, Result, SeqNo};
use crate::mem::pages::PAGE;
use crate::mem::region::Region;
use crate::pmem::persistence::{PersistSite, PersistenceBackend};
use crate::pmem::tree::PoolTree;

/// A sequence number in the header of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PoolSeqnoField {
    /// The pool contains all changes that the WAL has for it up to this sequence number, inclusive.
    AppliedThrough,
    /// No sequence number from this one on was ever used in the pool.
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

/// Sequence numbers have 56 bits. The bits above them contain a check.
const CHECK_SHIFT: u32 = 56;

fn encode_seqno_word(file_id: &[u8; 16], note: PoolSeqnoField, seqno: SeqNo) -> u64 {
    debug_assert!(seqno.0 >> CHECK_SHIFT == 0, "a sequence number has 56 bits");
    let check = xxh3(location_seed(file_id, note.offset()), &seqno.0.to_le_bytes());
    check << CHECK_SHIFT | seqno.0
}

/// Reads a sequence number from the header of the pool in `region`; 0 if none was written.
///
/// # Errors
/// `Corruption` if the check does not match.
pub(crate) fn read_seqno_field(region: &Region, file_id: &[u8; 16], note: PoolSeqnoField) -> Result<SeqNo> {
    let word = region.load(note.offset());
    let seqno = SeqNo(word & ((1 << CHECK_SHIFT) - 1));
    if word != 0 && encode_seqno_word(file_id, note, seqno) != word {
        return Err(Error::corruption("check of a field of the pool's header does not match").at_offset(note.offset()));
    }
    Ok(seqno)
}

/// Offset of the mark of a clean shutdown: a checksum of the sequence numbers in the header and of the length of the
/// pool, so that a mark of an earlier state does not match. 0 if the pool is open or was not closed.
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

/// Whether the pool in `region` was closed cleanly, and was not changed since.
pub(crate) fn has_clean_shutdown_mark(region: &Region, file_id: &[u8; 16]) -> bool {
    region.contains(0, PAGE) && region.load(CLEAN_SHUTDOWN_AT) == clean_shutdown_word(region, file_id)
}

impl<M: PersistenceBackend> PoolTree<M> {
    /// Sets the mark of a clean shutdown, durably when it returns. The caller makes sure that every change is durable
    /// and none follows.
    pub(crate) fn set_clean_shutdown_mark(&self) {
        self.backend.publish(CLEAN_SHUTDOWN_AT, clean_shutdown_word(self.region(), &self.file_id));
        self.backend.flush(CLEAN_SHUTDOWN_AT, 8, PersistSite::SetCleanMarkWord);
        self.backend.fence(PersistSite::SetCleanMarkDone);
    }

    /// Clears the mark of a clean shutdown, durably when it returns. From then on the pool may be changed.
    pub(crate) fn clear_clean_shutdown_mark(&self) {
        if self.region().load(CLEAN_SHUTDOWN_AT) != 0 {
            self.backend.publish(CLEAN_SHUTDOWN_AT, 0);
            self.backend.flush(CLEAN_SHUTDOWN_AT, 8, PersistSite::ClearCleanMarkWord);
            self.backend.fence(PersistSite::ClearCleanMarkDone);
        }
    }

    /// Writes `seqno` to the header, durably when it returns.
    pub(crate) fn write_seqno_field(&self, note: PoolSeqnoField, seqno: SeqNo) {
        self.backend.publish(note.offset(), encode_seqno_word(&self.file_id, note, seqno));
        self.backend.flush(note.offset(), 8, PersistSite::SeqnoFieldWord);
        self.backend.fence(PersistSite::SeqnoFieldDone);
    }
}
