//! A snapshot of the state as frames: the sender makes them one after the other from an owned snapshot of the
//! database, and the receiver ingests each into partitions of a new generation. Neither needs a file.
//!
//! A frame: number u64 LE, id of the snapshot u64 LE, body, xxh3-64 of all of these. Frames are numbered from 0. The
//! body of a frame with pairs: length u32 LE and name of the partition, then pairs in ascending order of their keys:
//! key length u32 LE, value length u32 LE, key, value. Partitions follow in ascending order of their names. The body
//! of the last frame: u32 MAX, the number of all pairs u64 LE.
//!
//! A transfer that was interrupted goes on at [`SnapshotReceiver::position`], if the sender still has that snapshot.

use crate::codec::{decode, encode, io_error};
use crate::state::{Application, ReceivedState, StateSnapshot, StateStore};
use azekura::Slice;
use serde::{Deserialize, Serialize};
use std::io;
use std::marker::PhantomData;
use std::ops::Bound;
use xxhash_rust::xxh3::xxh3_64;

/// A frame ends with the pair that reaches this number of bytes, unless the sender sets another.
const FRAME_LEN: usize = 4 << 20;
/// Instead of the length of a name, in the last frame.
const END: u32 = u32::MAX;

/// The data of a snapshot: a state of this node, or one that was received. A received one that is dropped before it is
/// installed deletes its partitions.
#[derive(Debug)]
pub struct SnapshotData(pub(crate) Data);

#[derive(Debug)]
pub(crate) enum Data {
    Own(StateSnapshot),
    Received(ReceivedState),
}

impl SnapshotData {
    /// The frames from a position on; from the beginning if it is empty. None if the snapshot was received.
    ///
    /// # Errors
    /// `InvalidData` for a position in another snapshot, or that no receiver has returned.
    pub fn frames(&self, position: &[u8]) -> io::Result<Option<Frames>> {
        let Data::Own(snapshot) = &self.0 else { return Ok(None) };
        let mut position = if position.is_empty() { Position::default() } else { decode(position, "position")? };
        if position.frames == 0 {
            position.id = snapshot.id;
        }
        if position.id != snapshot.id {
            return Err(invalid("of another snapshot was requested"));
        }
        Ok(Some(Frames { snapshot: snapshot.clone(), position, frame_len: FRAME_LEN, is_complete: false }))
    }
}

/// Where a transfer goes on: after `frames` frames with `pairs` pairs, the last of which has the key `last` in the
/// partition with this name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Position {
    /// The id of the snapshot; any before the first frame.
    id: u64,
    frames: u64,
    pairs: u64,
    partition: String,
    last: Option<Vec<u8>>,
}

/// The frames of a snapshot, each about 4 MiB, or longer by the last pair in it.
#[derive(Debug)]
pub struct Frames {
    snapshot: StateSnapshot,
    position: Position,
    frame_len: usize,
    is_complete: bool,
}

impl Frames {
    /// A frame ends with the pair that reaches this number of bytes. For networks that limit their messages: a frame
    /// exceeds it by less than its last pair and 28 bytes.
    #[must_use]
    pub fn frame_len(mut self, bytes: usize) -> Frames {
        self.frame_len = bytes;
        self
    }

    /// The body of the next frame that has pairs.
    fn pairs(&mut self) -> io::Result<Option<Vec<u8>>> {
        let Frames { snapshot: StateSnapshot { snapshot, state, .. }, position, frame_len, .. } = self;
        for (name, partition) in state.partitions() {
            if name < position.partition.as_str() {
                continue;
            }
            let after = position.last.as_ref().filter(|_| name == position.partition);
            let mut body = (name.len() as u32).to_le_bytes().to_vec();
            body.extend_from_slice(name.as_bytes());
            let mut last: Option<Slice> = None;
            let start = after.map_or(Bound::Unbounded, Bound::Excluded);
            for pair in snapshot.range::<&Vec<u8>>(partition, (start, Bound::Unbounded)) {
                let (key, value) = pair.map_err(io_error)?;
                // A key has at most 65,535 bytes, a value less than 4 GiB.
                body.extend_from_slice(&(key.len() as u32).to_le_bytes());
                body.extend_from_slice(&(value.len() as u32).to_le_bytes());
                body.extend_from_slice(&key);
                body.extend_from_slice(&value);
                position.pairs += 1;
                last = Some(key);
                if body.len() >= *frame_len {
                    break;
                }
            }
            if let Some(last) = last {
                (position.partition, position.last) = (name.to_owned(), Some(last.to_vec()));
                return Ok(Some(body));
            }
        }
        Ok(None)
    }
}

impl Iterator for Frames {
    type Item = io::Result<Vec<u8>>;

    fn next(&mut self) -> Option<io::Result<Vec<u8>>> {
        if self.is_complete {
            return None;
        }
        let body = match self.pairs() {
            Ok(Some(body)) => body,
            Ok(None) => {
                self.is_complete = true;
                [&END.to_le_bytes()[..], &self.position.pairs.to_le_bytes()].concat()
            }
            Err(error) => {
                self.is_complete = true;
                return Some(Err(error));
            }
        };
        let Position { frames, id, .. } = &self.position;
        let mut frame = [&frames.to_le_bytes()[..], &id.to_le_bytes(), &body].concat();
        frame.extend_from_slice(&xxh3_64(&frame).to_le_bytes());
        self.position.frames += 1;
        Some(Ok(frame))
    }
}

/// Takes the frames of a snapshot into partitions of a new generation. Dropped before the last frame, it deletes them.
#[derive(Debug)]
pub struct SnapshotReceiver<A: Application> {
    /// None after the last frame.
    state: Option<ReceivedState>,
    position: Position,
    application: PhantomData<fn() -> A>,
}

impl<A: Application> SnapshotReceiver<A> {
    pub(crate) fn new(store: &StateStore<A>) -> io::Result<SnapshotReceiver<A>> {
        let state = Some(store.new_generation()?);
        Ok(SnapshotReceiver { state, position: Position::default(), application: PhantomData })
    }

    /// Where the sender goes on: the argument of [`SnapshotData::frames`].
    ///
    /// # Errors
    /// None in practice: the position has a bounded size.
    pub fn position(&self) -> io::Result<Vec<u8>> {
        encode(&self.position)
    }

    /// Takes the next frame. Returns the snapshot after the last one.
    ///
    /// # Errors
    /// `InvalidData` for a frame that is damaged or not the next; nothing was taken, and the position is unchanged.
    /// Errors of azekura if the pairs cannot be written.
    pub fn receive(&mut self, frame: &[u8]) -> io::Result<Option<SnapshotData>> {
        let Frame { number, id, body } = parse_frame(frame)?;
        if number != self.position.frames {
            return Err(invalid(&format!("has number {number} instead of {}", self.position.frames)));
        }
        if number > 0 && id != self.position.id {
            return Err(invalid("is of another snapshot"));
        }
        let received = self.state.as_ref().ok_or_else(|| invalid("follows the last one"))?;
        let (name, pairs) = match body {
            Body::Pairs { partition, pairs } => (partition, pairs),
            Body::End { pairs } if pairs != self.position.pairs => {
                return Err(invalid("counts other pairs than were received"));
            }
            Body::End { .. } => {
                self.position.frames += 1;
                return Ok(self.state.take().map(|state| SnapshotData(Data::Received(state))));
            }
        };
        let partition = received.state().and_then(|state| state.partition(name));
        let partition = partition.ok_or_else(|| invalid(&format!("has the unknown partition {name:?}")))?;
        let (last, _) = *pairs.last().ok_or_else(|| invalid("has no pairs"))?;
        let position = Position {
            id,
            frames: number + 1,
            pairs: self.position.pairs + pairs.len() as u64,
            partition: name.to_owned(),
            last: Some(last.to_vec()),
        };
        partition.ingest(pairs).map_err(io_error)?;
        self.position = position;
        Ok(None)
    }
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("a frame of a snapshot {why}"))
}

/// A frame whose checksum is right.
#[derive(Debug)]
pub(crate) struct Frame<'a> {
    number: u64,
    id: u64,
    body: Body<'a>,
}

#[derive(Debug)]
enum Body<'a> {
    Pairs {
        /// The name of the partition.
        partition: &'a str,
        pairs: Vec<(&'a [u8], &'a [u8])>,
    },
    End {
        /// The number of all pairs.
        pairs: u64,
    },
}

pub(crate) fn parse_frame(frame: &[u8]) -> io::Result<Frame<'_>> {
    let checked = frame.split_last_chunk().filter(|(checked, sum)| xxh3_64(checked).to_le_bytes() == **sum);
    let header = checked.and_then(|(checked, _)| {
        let (number, rest) = checked.split_first_chunk()?;
        let (id, body) = rest.split_first_chunk()?;
        Some((u64::from_le_bytes(*number), u64::from_le_bytes(*id), body))
    });
    let (number, id, body) = header.ok_or_else(|| invalid("is damaged"))?;
    let (name_len, rest) = body.split_first_chunk().ok_or_else(|| invalid("is too short"))?;
    let name_len = u32::from_le_bytes(*name_len);
    if name_len == END {
        let pairs = rest.try_into().map_err(|_| invalid("has no number of pairs"))?;
        return Ok(Frame { number, id, body: Body::End { pairs: u64::from_le_bytes(pairs) } });
    }
    let (name, mut rest) = rest.split_at_checked(name_len as usize).ok_or_else(|| invalid("is too short"))?;
    let partition = str::from_utf8(name).map_err(|_| invalid("has a name that is not UTF-8"))?;
    let mut pairs = Vec::new();
    while !rest.is_empty() {
        let (key, value, after) = parse_pair(rest).ok_or_else(|| invalid("has a pair that is too short"))?;
        pairs.push((key, value));
        rest = after;
    }
    Ok(Frame { number, id, body: Body::Pairs { partition, pairs } })
}

/// Key, value, and the bytes after them.
fn parse_pair(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let (key_len, bytes) = bytes.split_first_chunk()?;
    let (value_len, bytes) = bytes.split_first_chunk()?;
    let (key, bytes) = bytes.split_at_checked(u32::from_le_bytes(*key_len) as usize)?;
    let (value, bytes) = bytes.split_at_checked(u32::from_le_bytes(*value_len) as usize)?;
    Some((key, value, bytes))
}
