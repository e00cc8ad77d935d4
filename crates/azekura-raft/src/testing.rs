//! The decoders of bytes from disk and from other nodes, each as one function, for fuzzing.

use crate::codec;
use crate::snapshot::{Position, parse_frame};
use crate::state::Applied;
use openraft::impls::{Vote, leader_id_adv::LeaderId};
use openraft::{BasicNode, EntryPayload, LogId, StoredMembership};
use std::io;
use xxhash_rust::xxh3::xxh3_64;

/// A decoder of bytes from disk or from another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FuzzDecoder {
    /// A frame of a snapshot without its checksum, which is added.
    SnapshotFrame,
    /// Where a transfer of a snapshot goes on.
    SnapshotPosition,
    /// An entry of the log, with openraft's default types and a text as command.
    Entry,
    /// The vote, with openraft's default types.
    Vote,
    /// What was applied last, with openraft's default types.
    Applied,
}

type Leader = LeaderId<u64, u64>;
type Entry = openraft::Entry<Leader, EntryPayload<String, u64, BasicNode>>;
type AppliedPosition = (Option<LogId<Leader>>, StoredMembership<Leader, u64, BasicNode>);

/// Decodes bytes, and drops the value.
///
/// # Errors
/// `InvalidData` if they are not what the decoder expects.
pub fn decode(decoder: FuzzDecoder, bytes: &[u8]) -> io::Result<()> {
    match decoder {
        FuzzDecoder::SnapshotFrame => parse_frame(&[bytes, &xxh3_64(bytes).to_le_bytes()].concat()).map(drop),
        FuzzDecoder::SnapshotPosition => codec::decode::<Position>(bytes, "position").map(drop),
        FuzzDecoder::Entry => codec::decode::<Entry>(bytes, "entry").map(drop),
        FuzzDecoder::Vote => codec::decode::<Vote<Leader>>(bytes, "vote").map(drop),
        FuzzDecoder::Applied => {
            let applied = Applied::decode(bytes)?;
            codec::decode::<AppliedPosition>(&applied.position, "applied state").map(drop)
        }
    }
}
