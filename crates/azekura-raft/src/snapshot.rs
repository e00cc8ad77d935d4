//! A snapshot of the state as frames: the sender makes them one after the other from an owned snapshot of the
//! database, and the receiver ingests each into partitions of a new generation. Neither needs a file.
//!
//! A frame: number u64 LE, id of the snapshot u64 LE, body, xxh3-64 of all of these. Frames are numbered from 0. The
//! body of a frame with pairs: the number of the partition u32 LE in the order of [`Application::partitions`], then
//! pairs in ascending order of their keys: key length u32 LE, value length u32 LE, key, value. The body of the last
//! frame: u32 MAX, the number of all pairs u64 LE.
//!
//! A transfer that was interrupted goes on at [`SnapshotReceiver::position`], if the sender still has that snapshot.

use crate::codec::{decode, encode, io_error};
use crate::state::{Application, State, StateSnapshot, StateStore};
use azekura::Slice;
use serde::{Deserialize, Serialize};
use std::io;
use std::ops::Bound;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// A frame ends with the pair that reaches this number of bytes.
const FRAME_LEN: usize = 4 << 20;
/// The number of the partition in the last frame.
const END: u32 = u32::MAX;

/// The data of a snapshot: a state of this node, or one that was received. Clones of the first kind are cheap.
#[derive(Debug)]
pub struct SnapshotData(pub(crate) Data);

#[derive(Debug)]
pub(crate) enum Data {
    Own(StateSnapshot),
    Received(State),
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
        Ok(Some(Frames { snapshot: snapshot.clone(), position, is_complete: false }))
    }
}

/// Where a transfer goes on: after `frames` frames with `pairs` pairs, the last of which has the key `last`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Position {
    /// The id of the snapshot; any before the first frame.
    id: u64,
    frames: u64,
    pairs: u64,
    partition: u32,
    last: Option<Vec<u8>>,
}

/// The frames of a snapshot, each about 4 MiB, or longer by the last pair in it.
#[derive(Debug)]
pub struct Frames {
    snapshot: StateSnapshot,
    position: Position,
    is_complete: bool,
}

impl Frames {
    /// The body of the next frame that has pairs.
    fn pairs(&mut self) -> io::Result<Option<Vec<u8>>> {
        let Frames { snapshot: StateSnapshot { snapshot, state, .. }, position, .. } = self;
        while let Some(partition) = state.partitions().nth(position.partition as usize) {
            let start = position.last.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
            let mut body = position.partition.to_le_bytes().to_vec();
            let mut last: Option<Slice> = None;
            for pair in snapshot.range::<&Vec<u8>>(partition, (start, Bound::Unbounded)) {
                let (key, value) = pair.map_err(io_error)?;
                // A key has at most 65,535 bytes, a value less than 4 GiB.
                body.extend_from_slice(&(key.len() as u32).to_le_bytes());
                body.extend_from_slice(&(value.len() as u32).to_le_bytes());
                body.extend_from_slice(&key);
                body.extend_from_slice(&value);
                position.pairs += 1;
                last = Some(key);
                if body.len() >= FRAME_LEN {
                    break;
                }
            }
            if let Some(last) = last {
                position.last = Some(last.to_vec());
                return Ok(Some(body));
            }
            (position.partition, position.last) = (position.partition + 1, None);
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
    store: Arc<StateStore<A>>,
    /// None after the last frame.
    state: Option<State>,
    position: Position,
}

impl<A: Application> SnapshotReceiver<A> {
    pub(crate) fn new(store: Arc<StateStore<A>>) -> io::Result<SnapshotReceiver<A>> {
        let state = Some(store.new_generation()?);
        Ok(SnapshotReceiver { store, state, position: Position::default() })
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
        let (number, id, body) = parse_frame(frame).ok_or_else(|| invalid("is damaged"))?;
        if number != self.position.frames {
            return Err(invalid(&format!("has number {number} instead of {}", self.position.frames)));
        }
        if number > 0 && id != self.position.id {
            return Err(invalid("is of another snapshot"));
        }
        let state = self.state.as_ref().ok_or_else(|| invalid("follows the last one"))?;
        let (partition_number, rest) = body.split_first_chunk().ok_or_else(|| invalid("is too short"))?;
        let partition_number = u32::from_le_bytes(*partition_number);
        if partition_number == END {
            if rest != self.position.pairs.to_le_bytes() {
                return Err(invalid("counts other pairs than were received"));
            }
            self.position.frames += 1;
            return Ok(self.state.take().map(|state| SnapshotData(Data::Received(state))));
        }
        let partition = state.partitions().nth(partition_number as usize);
        let partition = partition.ok_or_else(|| invalid("has an unknown partition"))?;
        let mut pairs = Vec::new();
        let mut rest = rest;
        while !rest.is_empty() {
            let (key, value, after) = parse_pair(rest).ok_or_else(|| invalid("has a pair that is too short"))?;
            pairs.push((key, value));
            rest = after;
        }
        let (last, _) = *pairs.last().ok_or_else(|| invalid("has no pairs"))?;
        let position = Position {
            id,
            frames: number + 1,
            pairs: self.position.pairs + pairs.len() as u64,
            partition: partition_number,
            last: Some(last.to_vec()),
        };
        partition.ingest(pairs).map_err(io_error)?;
        self.position = position;
        Ok(None)
    }
}

impl<A: Application> Drop for SnapshotReceiver<A> {
    fn drop(&mut self) {
        if let Some(state) = self.state.take() {
            self.store.discard(&state);
        }
    }
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("a frame of a snapshot {why}"))
}

/// The number, the id and the body of a frame whose checksum is right.
fn parse_frame(frame: &[u8]) -> Option<(u64, u64, &[u8])> {
    let (checked, checksum) = frame.split_at_checked(frame.len().checked_sub(8)?)?;
    if xxh3_64(checked).to_le_bytes() != checksum {
        return None;
    }
    let (number, rest) = checked.split_first_chunk()?;
    let (id, body) = rest.split_first_chunk()?;
    Some((u64::from_le_bytes(*number), u64::from_le_bytes(*id), body))
}

/// Key, value, and the bytes after them.
fn parse_pair(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let (key_len, bytes) = bytes.split_first_chunk()?;
    let (value_len, bytes) = bytes.split_first_chunk()?;
    let (key, bytes) = bytes.split_at_checked(u32::from_le_bytes(*key_len) as usize)?;
    let (value, bytes) = bytes.split_at_checked(u32::from_le_bytes(*value_len) as usize)?;
    Some((key, value, bytes))
}
