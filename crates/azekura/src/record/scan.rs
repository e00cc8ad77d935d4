//! Reads records in order, and looks for what still verifies behind damage.

use crate::base::coding::Decoder;
use crate::base::{Error, Result, SeqNo};
use crate::record::frame::{self, ALIGN, FrameHead, FrameKind, HEADER_LEN, Place, stored_len};
use crate::record::window::{Source, Window};

/// Which record may follow the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// The one with the very next sequence number.
    Consecutive,
    /// Any later one.
    Rising,
}

/// What [`RecordReader::next`] met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Item {
    /// A whole record; [`RecordReader::payload`] has its bytes.
    Record(RecordHead),
    /// A note that everything up to here is durable.
    Watermark(SeqNo),
    /// No further record follows: the end, or damage. [`RecordReader::position`] says where.
    Stop,
}

/// A record without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordHead {
    pub(crate) first: SeqNo,
    pub(crate) count: u32,
    /// What was durable when it was written.
    pub(crate) durable: SeqNo,
}

impl RecordHead {
    /// The last sequence number it takes.
    pub(crate) fn last(&self) -> SeqNo {
        SeqNo(self.first.0 + u64::from(self.count) - 1)
    }
}

/// What verifies behind a place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Behind {
    /// Frames that verify.
    pub(crate) frames: u64,
    /// The highest watermark that any of them carries.
    pub(crate) durable: SeqNo,
}

impl Behind {
    pub(crate) fn join(self, other: Behind) -> Behind {
        Behind { frames: self.frames + other.frames, durable: self.durable.max(other.durable) }
    }
}

/// Where the payload of the current record lies.
#[derive(Clone, Copy, Debug)]
enum Payload {
    InFile { offset: u64, len: usize },
    Assembled { skip: usize },
}

/// Reads the records of one file. Memory: one window, one frame, and the record being put together from fragments,
/// which is never longer than what of the file was read.
#[derive(Debug)]
pub(crate) struct RecordReader<'a> {
    window: Window<'a>,
    place: Place,
    order: Order,
    /// Where the next frame is looked for.
    at: u64,
    /// End of the last whole record or watermark.
    end: u64,
    last: SeqNo,
    assembled: Vec<u8>,
    payload: Payload,
    /// Bytes that the search may still hash, so that a file made to look like frames cannot keep it busy for ever.
    budget: u64,
}

/// Bytes that the search hashes at most, beside a multiple of the file's length.
const SEARCH_BASE: u64 = 256 << 20;
const SEARCH_FACTOR: u64 = 16;

impl<'a> RecordReader<'a> {
    /// Reads from `at` on (a multiple of 8); `last` is the sequence number before the first record.
    pub(crate) fn new(
        source: Source<'a>,
        place: Place,
        at: u64,
        last: SeqNo,
        order: Order,
    ) -> Result<RecordReader<'a>> {
        debug_assert!(at.is_multiple_of(ALIGN));
        let window = Window::new(source)?;
        let budget = window.source_len().saturating_mul(SEARCH_FACTOR).saturating_add(SEARCH_BASE);
        let payload = Payload::Assembled { skip: 0 };
        Ok(RecordReader { window, place, order, at, end: at, last, assembled: Vec::new(), payload, budget })
    }

    /// Where the next frame is looked for; after [`Item::Stop`], where reading stopped.
    pub(crate) fn position(&self) -> u64 {
        self.at
    }

    /// End of the last whole record or watermark, in bytes, with its padding if that is there.
    pub(crate) fn end(&self) -> u64 {
        self.end.min(self.window.source_len())
    }

    /// The last sequence number read so far.
    pub(crate) fn last(&self) -> SeqNo {
        self.last
    }

    /// Reads on.
    ///
    /// # Errors
    /// `Unsupported` for frames of a newer version, and what reading the file fails with.
    pub(crate) fn next(&mut self) -> Result<Item> {
        let Some(head) = self.frame_at(self.at)? else { return Ok(Item::Stop) };
        let behind = self.at + stored_len(head.len);
        match head.kind {
            FrameKind::Middle | FrameKind::Last => Ok(Item::Stop),
            FrameKind::Watermark => {
                let fits = head.seqno == self.last || self.order == Order::Rising;
                let Some(durable) = self.watermark(&head)?.filter(|_| fits) else { return Ok(Item::Stop) };
                (self.at, self.end) = (behind, behind);
                Ok(Item::Watermark(durable))
            }
            FrameKind::Full => {
                let Some((record, prefix)) = self.record_head(&head)? else { return Ok(Item::Stop) };
                let offset = self.at + (HEADER_LEN + prefix) as u64;
                self.payload = Payload::InFile { offset, len: head.len - prefix };
                Ok(self.complete(record, behind))
            }
            FrameKind::First => self.assemble(&head),
        }
    }

    fn complete(&mut self, record: RecordHead, end: u64) -> Item {
        (self.at, self.end, self.last) = (end, end, record.last());
        Item::Record(record)
    }

    /// Puts the record together whose first fragment stands at the position.
    fn assemble(&mut self, first: &FrameHead) -> Result<Item> {
        let Some((record, prefix)) = self.record_head(first)? else { return Ok(Item::Stop) };
        self.assembled = Vec::new();
        self.gather(first)?;
        self.at += stored_len(first.len);
        while let Some(head) = self.frame_at(self.at)? {
            if head.seqno != record.first || !matches!(head.kind, FrameKind::Middle | FrameKind::Last) {
                break;
            }
            self.gather(&head)?;
            let end = self.at + stored_len(head.len);
            if head.kind == FrameKind::Last {
                self.payload = Payload::Assembled { skip: prefix };
                return Ok(self.complete(record, end));
            }
            self.at = end;
        }
        Ok(Item::Stop)
    }

    /// Appends the payload of the frame at the position to what is being put together.
    fn gather(&mut self, head: &FrameHead) -> Result<()> {
        let at = self.at;
        self.assembled
            .try_reserve(head.len)
            .map_err(|_| Error::corruption("no memory for a record as large as this").at_offset(at))?;
        let bytes = held(self.window.bytes(at + HEADER_LEN as u64, head.len)?)?;
        self.assembled.extend_from_slice(bytes);
        Ok(())
    }

    /// The payload of the record that [`RecordReader::next`] returned last.
    pub(crate) fn payload(&mut self) -> Result<&[u8]> {
        match self.payload {
            Payload::InFile { offset, len } => held(self.window.bytes(offset, len)?),
            Payload::Assembled { skip } => Ok(&self.assembled[skip..]),
        }
    }

    /// The frame that verifies at `at`, if one does.
    fn frame_at(&mut self, at: u64) -> Result<Option<FrameHead>> {
        let Some(head) = self.window.bytes(at, HEADER_LEN)? else { return Ok(None) };
        let len = FrameHead::claimed_len(head).unwrap_or(0);
        let place = self.place;
        let Some(bytes) = self.window.bytes(at, HEADER_LEN + len)? else { return Ok(None) };
        Ok(frame::decode(&place, at, bytes)?.map(|(head, _)| head))
    }

    /// Reads what a first frame at the position says of its record, and the length of that; `None` if it cannot be the
    /// next record.
    fn record_head(&mut self, head: &FrameHead) -> Result<Option<(RecordHead, usize)>> {
        let bytes = held(self.window.bytes(self.at + HEADER_LEN as u64, head.len)?)?;
        let follows = match self.order {
            Order::Consecutive => head.seqno.0 == self.last.0 + 1,
            Order::Rising => head.seqno > self.last,
        };
        Ok(record_head(head, bytes).filter(|_| follows))
    }

    fn watermark(&mut self, head: &FrameHead) -> Result<Option<SeqNo>> {
        let bytes = held(self.window.bytes(self.at + HEADER_LEN as u64, head.len)?)?;
        Ok(watermark(head, bytes))
    }

    /// Where the next frame verifies, at `from` (a multiple of 8) or behind it.
    ///
    /// # Errors
    /// `Corruption` if so much looks like frames that the search was given up.
    fn find(&mut self, from: u64) -> Result<Option<(u64, FrameHead)>> {
        let mut at = from;
        while let Some(bytes) = self.window.at_least(at, HEADER_LEN)? {
            let epoch = self.place.epoch;
            let places = (bytes.len() - HEADER_LEN) / ALIGN as usize + 1;
            let candidate = (0..places).map(|i| i * ALIGN as usize).find(|i| FrameHead::may_start(&bytes[*i..], epoch));
            let Some(skip) = candidate else {
                at += (places * ALIGN as usize) as u64;
                continue;
            };
            let claimed = FrameHead::claimed_len(&bytes[skip..]).unwrap_or(0) as u64;
            at += skip as u64;
            if at + HEADER_LEN as u64 + claimed <= self.window.source_len() {
                self.budget = self.budget.checked_sub(claimed + HEADER_LEN as u64).ok_or_else(|| {
                    Error::corruption("too much behind the damage looks like frames to tell them apart").at_offset(at)
                })?;
                if let Some(head) = self.frame_at(at)? {
                    return Ok(Some((at, head)));
                }
            }
            at += ALIGN;
        }
        Ok(None)
    }

    /// Counts what verifies from the position on, and how far it says the log was durable. Reading cannot go on after
    /// it.
    ///
    /// # Errors
    /// `Corruption` if so much looks like frames that the search was given up.
    pub(crate) fn search(&mut self) -> Result<Behind> {
        let mut behind = Behind::default();
        let mut from = self.at;
        while let Some((at, head)) = self.find(from)? {
            let bytes = held(self.window.bytes(at + HEADER_LEN as u64, head.len)?)?;
            let durable = match head.kind {
                FrameKind::Full | FrameKind::First => record_head(&head, bytes).map(|(record, _)| record.durable),
                FrameKind::Watermark => watermark(&head, bytes),
                FrameKind::Middle | FrameKind::Last => None,
            };
            behind = behind.join(Behind { frames: 1, durable: durable.unwrap_or_default() });
            from = at + stored_len(head.len);
        }
        Ok(behind)
    }

    /// Goes on at the next frame behind the damage where reading stopped that says which number comes next, if no
    /// number above `through` is missing in front of it; false, with nothing changed, if there is none.
    ///
    /// # Errors
    /// `Corruption` if so much looks like frames that the search was given up.
    pub(crate) fn resume(&mut self, through: SeqNo) -> Result<bool> {
        let mut from = self.at;
        while let Some((at, head)) = self.find(from)? {
            match before(&head) {
                Some(last) if last < self.last || last > through => return Ok(false),
                Some(last) => {
                    (self.at, self.last) = (at, last);
                    return Ok(true);
                }
                None => from = at + stored_len(head.len),
            }
        }
        Ok(false)
    }

    /// Moves behind the frame or the damage where reading stopped, to the next frame that verifies; false if there is
    /// none.
    ///
    /// # Errors
    /// `Corruption` if so much looks like frames that the search was given up.
    pub(crate) fn skip(&mut self, stopped_at_frame: u64) -> Result<bool> {
        let found = self.find(self.at.max(stopped_at_frame + ALIGN))?;
        if let Some((at, _)) = found {
            self.at = at;
        }
        Ok(found.is_some())
    }
}

/// What a verified frame says of the numbers before it: the last one that a record in front of it takes.
fn before(head: &FrameHead) -> Option<SeqNo> {
    match head.kind {
        FrameKind::Full | FrameKind::First => head.seqno.0.checked_sub(1).map(SeqNo),
        FrameKind::Watermark => Some(head.seqno),
        FrameKind::Middle | FrameKind::Last => None,
    }
}

fn record_head(head: &FrameHead, payload: &[u8]) -> Option<(RecordHead, usize)> {
    let mut d = Decoder::new(payload);
    let (delta, count) = (d.varint().ok()?, d.varint_u32().ok()?);
    let durable = SeqNo(head.seqno.0.checked_sub(1)?.checked_sub(delta)?);
    let fits = count > 0 && head.seqno.0 + u64::from(count) - 1 <= SeqNo::MAX.0;
    fits.then_some((RecordHead { first: head.seqno, count, durable }, payload.len() - d.rest().len()))
}

fn watermark(head: &FrameHead, payload: &[u8]) -> Option<SeqNo> {
    let delta = Decoder::new(payload).varint().ok()?;
    head.seqno.0.checked_sub(delta).map(SeqNo)
}

/// What a verified frame's length covers can only be missing if the file shrank under the reader.
fn held(bytes: Option<&[u8]>) -> Result<&[u8]> {
    bytes.ok_or_else(|| Error::corruption("file became shorter while it was read"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::writer::{FrameWriter, Record};
    use crate::vfs::dice::Dice;
    use crate::vfs::mem::MemFs;
    use crate::vfs::{File, Fs, OpenMode};
    use std::path::Path;
    use std::sync::Arc;

    const PLACE: Place = Place { file_id: [4; 16], epoch: 2 };

    type Owned = (u64, u32, Vec<u8>);

    fn written(frame_max: usize, records: &[Owned]) -> Vec<u8> {
        let mut writer = FrameWriter::with_frame_max(frame_max);
        writer.begin(0);
        let mut out = Vec::new();
        let mut sink = |bytes: &[u8], _: u64| {
            out.extend_from_slice(bytes);
            Ok(())
        };
        for (i, (first, count, payload)) in records.iter().enumerate() {
            let durable = SeqNo(first / 2);
            writer.put(&PLACE, &Record { first: SeqNo(*first), count: *count, durable, payload }, &mut sink).unwrap();
            if i % 3 == 2 {
                let last = SeqNo(first + u64::from(*count) - 1);
                writer.put_watermark(&PLACE, last, durable, &mut sink).unwrap();
            }
        }
        writer.flush(&mut sink).unwrap();
        out
    }

    fn some_records(dice: &mut Dice, n: usize, longest: usize) -> Vec<Owned> {
        let mut first = 1;
        let mut record = |_| {
            let count = 1 + dice.below(3) as u32;
            let payload = (0..dice.below(longest)).map(|_| dice.throw() as u8).collect();
            first += u64::from(count);
            (first - u64::from(count), count, payload)
        };
        (0..n).map(&mut record).collect()
    }

    fn reader(source: Source<'_>, order: Order) -> RecordReader<'_> {
        RecordReader::new(source, PLACE, 0, SeqNo::ZERO, order).unwrap()
    }

    fn read_all(reader: &mut RecordReader<'_>) -> Vec<Owned> {
        let mut out = Vec::new();
        loop {
            match reader.next().unwrap() {
                Item::Record(record) => out.push((record.first.0, record.count, reader.payload().unwrap().to_vec())),
                Item::Watermark(durable) => assert!(durable <= reader.last()),
                Item::Stop => return out,
            }
        }
    }

    #[test]
    fn records_of_every_size_come_back_from_memory_and_file() {
        let mut dice = Dice::new(1, 2);
        for frame_max in [16, 17, 100, 4096] {
            let records = some_records(&mut dice, 60, 500);
            let bytes = written(frame_max, &records);
            let mut from_memory = reader(Source::Bytes(&bytes), Order::Consecutive);
            assert_eq!(read_all(&mut from_memory), records);
            assert_eq!(from_memory.end(), bytes.len() as u64);
            let fs = MemFs::new();
            let file: Arc<dyn File> = fs.open(Path::new("/f"), OpenMode::Create).unwrap();
            file.write_at(&bytes, 0).unwrap();
            assert_eq!(read_all(&mut reader(Source::File(&*file), Order::Consecutive)), records);
        }
    }

    #[test]
    fn frames_larger_than_the_window_and_records_larger_than_a_frame() {
        let big = vec![5; (2 << 20) + 3];
        let huge = vec![6; crate::record::frame::PAYLOAD_MAX + 100];
        let records = vec![(1, 1, b"a".to_vec()), (2, 1, big), (3, 2, huge), (5, 1, b"z".to_vec())];
        let bytes = written(usize::MAX, &records);
        let fs = MemFs::new();
        let file: Arc<dyn File> = fs.open(Path::new("/f"), OpenMode::Create).unwrap();
        file.write_at(&bytes, 0).unwrap();
        assert!(read_all(&mut reader(Source::File(&*file), Order::Consecutive)) == records);
    }

    #[test]
    fn damage_stops_the_reader_and_the_search_counts_what_is_behind() {
        let mut dice = Dice::new(5, 5);
        let records = some_records(&mut dice, 30, 80);
        let bytes = written(40, &records);
        for at in (0..bytes.len()).step_by(3) {
            let mut bad = bytes.clone();
            bad[at] ^= 0x20;
            let mut damaged = reader(Source::Bytes(&bad), Order::Consecutive);
            let read = read_all(&mut damaged);
            assert!(records.starts_with(&read));
            let behind = damaged.search().unwrap();
            let next = records.get(read.len() + 1).map_or(u64::MAX, |(first, ..)| *first);
            // The record behind the damaged one says how far the log was durable when it was written.
            assert!(read.len() + 1 >= records.len() || behind.frames > 0 && behind.durable.0 >= next / 2, "{at}");
            let mut salvage = reader(Source::Bytes(&bad), Order::Rising);
            let mut salvaged = Vec::new();
            loop {
                let from = salvage.position();
                salvaged.extend(read_all(&mut salvage));
                if !salvage.skip(from.max(salvage.position())).unwrap() {
                    break;
                }
            }
            assert!(salvaged.len() + 1 >= records.len() && salvaged.iter().all(|record| records.contains(record)));
        }
    }

    #[test]
    fn random_bytes_hold_nothing() {
        let mut dice = Dice::new(8, 8);
        for _ in 0..300 {
            let mut bytes: Vec<u8> = (0..dice.below(4000)).map(|_| dice.throw() as u8).collect();
            for head in bytes.chunks_exact_mut(24) {
                head[11] = 0;
                head[12..16].copy_from_slice(&2u32.to_le_bytes());
                head[23] = 1 + dice.below(5) as u8;
            }
            let mut random = reader(Source::Bytes(&bytes), Order::Consecutive);
            assert_eq!((random.next().unwrap(), random.search().unwrap()), (Item::Stop, Behind::default()));
        }
    }

    #[test]
    fn the_search_gives_up_on_a_file_made_to_look_like_frames() {
        let mut bytes = vec![0; 24 << 20];
        for head in bytes.chunks_exact_mut(24) {
            head[8..11].copy_from_slice(&[0xff; 3]);
            head[12..16].copy_from_slice(&2u32.to_le_bytes());
            head[23] = 1;
        }
        let error = reader(Source::Bytes(&bytes), Order::Consecutive).search().unwrap_err();
        assert_eq!(error.kind(), crate::base::ErrorKind::Corruption);
    }
}
