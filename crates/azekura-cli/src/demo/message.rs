//! What the writer tells its parent through the pipe: a tag byte, the length of the rest (4 bytes), the rest.

use std::io::{self, Read, Write};

use azekura::{Metrics, PartitionMetrics};

/// The longest sentence that is believed.
const TEXT_BYTES_MAX: usize = 64 << 10;

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// The next job is done: its put has returned.
    Stored { len: u64, hash: u64 },
    /// The next job could not be done; the sentence says why.
    LeftOut(String),
    /// How the database stands.
    Counters(Counters),
    /// The writer is through.
    Finished { out_of_time: bool },
    /// The writer has failed.
    Failed { code: u8, kind: String, message: String },
}

/// Figures of one writer process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counters {
    pub(crate) user_bytes: u64,
    pub(crate) log_bytes: u64,
    pub(crate) flushed_bytes: u64,
    pub(crate) compaction_bytes: u64,
    pub(crate) flushes: u64,
    pub(crate) compactions: u64,
    /// The most levels that held tables at once.
    pub(crate) levels: u64,
}

impl Counters {
    pub(crate) fn of(db: &Metrics, partition: &PartitionMetrics) -> Counters {
        Counters {
            user_bytes: db.user_bytes,
            log_bytes: db.log_bytes,
            flushed_bytes: db.flushed_bytes,
            compaction_bytes: db.compaction_bytes_written,
            flushes: db.flushes,
            compactions: db.compactions + db.trivial_moves,
            levels: partition.levels.iter().filter(|level| level.tables > 0).count() as u64,
        }
    }

    /// The sum over two processes, and the larger tree of the two.
    pub(crate) fn and_then(self, later: Counters) -> Counters {
        Counters {
            user_bytes: self.user_bytes + later.user_bytes,
            log_bytes: self.log_bytes + later.log_bytes,
            flushed_bytes: self.flushed_bytes + later.flushed_bytes,
            compaction_bytes: self.compaction_bytes + later.compaction_bytes,
            flushes: self.flushes + later.flushes,
            compactions: self.compactions + later.compactions,
            levels: self.levels.max(later.levels),
        }
    }

    /// Bytes written to disk for each byte put.
    pub(crate) fn write_amplification(&self) -> f64 {
        let written = self.log_bytes + self.flushed_bytes + self.compaction_bytes;
        written as f64 / self.user_bytes.max(1) as f64
    }
}

impl Message {
    /// Writes the message whole; once this returns, the parent will read it even if the writer dies.
    pub(crate) fn send(&self, out: &mut impl Write) -> io::Result<()> {
        let (tag, rest) = self.encode();
        let mut bytes = vec![tag];
        bytes.extend_from_slice(&(rest.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&rest);
        out.write_all(&bytes)?;
        out.flush()
    }

    /// The next message; `None` at the end of the pipe, even in the middle of a message.
    pub(crate) fn receive(input: &mut impl Read) -> io::Result<Option<Message>> {
        let mut head = [0; 5];
        if !filled(input, &mut head)? {
            return Ok(None);
        }
        let length = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
        if length > TEXT_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a message is too long"));
        }
        let mut rest = vec![0; length];
        if !filled(input, &mut rest)? {
            return Ok(None);
        }
        let unknown = || io::Error::new(io::ErrorKind::InvalidData, "a message makes no sense");
        Message::decode(head[0], &rest).map(Some).ok_or_else(unknown)
    }

    fn encode(&self) -> (u8, Vec<u8>) {
        let cut = |text: &str| text.as_bytes()[..text.len().min(TEXT_BYTES_MAX / 4)].to_vec();
        match self {
            Message::Stored { len, hash } => (b'S', numbers(&[*len, *hash])),
            Message::LeftOut(why) => (b'L', cut(why)),
            Message::Counters(c) => (
                b'C',
                numbers(&[
                    c.user_bytes,
                    c.log_bytes,
                    c.flushed_bytes,
                    c.compaction_bytes,
                    c.flushes,
                    c.compactions,
                    c.levels,
                ]),
            ),
            Message::Finished { out_of_time } => (b'F', vec![u8::from(*out_of_time)]),
            Message::Failed { code, kind, message } => {
                (b'E', [vec![*code], cut(kind), vec![b'\n'], cut(message)].concat())
            }
        }
    }

    fn decode(tag: u8, rest: &[u8]) -> Option<Message> {
        let number = |i: usize| Some(u64::from_le_bytes(rest.get(i * 8..i * 8 + 8)?.try_into().ok()?));
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Some(match tag {
            b'S' => Message::Stored { len: number(0)?, hash: number(1)? },
            b'L' => Message::LeftOut(text(rest)),
            b'C' => Message::Counters(Counters {
                user_bytes: number(0)?,
                log_bytes: number(1)?,
                flushed_bytes: number(2)?,
                compaction_bytes: number(3)?,
                flushes: number(4)?,
                compactions: number(5)?,
                levels: number(6)?,
            }),
            b'F' => Message::Finished { out_of_time: *rest.first()? != 0 },
            b'E' => {
                let (code, rest) = rest.split_first()?;
                let (kind, message) = rest.split_at(rest.iter().position(|&byte| byte == b'\n')?);
                Message::Failed { code: *code, kind: text(kind), message: text(&message[1..]) }
            }
            _ => return None,
        })
    }
}

fn numbers(all: &[u64]) -> Vec<u8> {
    all.iter().flat_map(|n| n.to_le_bytes()).collect()
}

/// Fills `buffer`, or says that the pipe ended before.
fn filled(input: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
    match input.read_exact(buffer) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_round_trip_and_a_cut_one_is_the_end() {
        let all = [
            Message::Stored { len: 5, hash: u64::MAX },
            Message::LeftOut("a/b: no".into()),
            Message::Counters(Counters { user_bytes: 1, levels: 7, ..Counters::default() }),
            Message::Finished { out_of_time: true },
            Message::Failed { code: 4, kind: "locked".into(), message: "two\nlines".into() },
        ];
        let mut pipe = Vec::new();
        for message in &all {
            message.send(&mut pipe).unwrap();
        }
        let mut input = pipe.as_slice();
        for message in &all {
            assert_eq!(Message::receive(&mut input).unwrap().as_ref(), Some(message));
        }
        assert_eq!(Message::receive(&mut input).unwrap(), None);
        let mut first = Vec::new();
        all[0].send(&mut first).unwrap();
        for cut in 0..first.len() {
            assert_eq!(Message::receive(&mut &first[..cut]).unwrap(), None, "cut at {cut}");
        }
        assert!(Message::receive(&mut &b"?\0\0\0\0"[..]).is_err());
    }
}
