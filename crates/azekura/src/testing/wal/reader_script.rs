//! The script of the WAL reader, `testdata/scripts/wal_reader.txt`: segments with damage, what is replayed, and where
//! the WAL ends.
//!
//! - `wal [segment=BYTES] [mapped]`: an empty WAL. `write WORD…`: a number appends a commit with this number of
//!   sequence numbers; `len=BYTES` is the length of payloads from then on (60); `sync`, `seal`, `sync-sealed`,
//!   `retire=SEQNO`.
//! - `segments`: the segments with the first sequence number and the offset of each commit.
//! - `open [MODE] [refuse=SEQNO]`: opens again after the process was killed. `power-loss [SURVIVAL]`: before that.
//! - Damage: `flip SEQNO [at=OFFSET]`: a byte of the commit, or of the header of its segment; `zero SEQNO BYTES`, `cut
//!   SEQNO`: from the begin of the commit on; `erase FILE`: all commits, not the header; `remove FILE`; `copy FILE
//!   NAME`; `version FILE BYTE`: the header is of another version; `junk NAME`.
//! - `replay [MODE] [flushed=SEQNO] [durable=SEQNO] [refuse=SEQNO] [database=BYTE] [list=EPOCH:FILE,…]
//!   [end=EPOCH:SEQNO] [held=SEQNO]`: shows the result of the mode, or of all three. `advice`: the message of the
//!   error.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::base::version_edit::{FileNumber, WalEpoch};
use crate::base::{Error, Result, SeqNo};
use crate::testing::script::check_component_script;
use crate::testing::wal::wal_fixture::{
    DATABASE, OwnedWalCommit, WalFixture, dir, file_bytes, flip_byte, load_manifest_state, overwrite,
    replay_with_options, wal_options,
};
use crate::testing::{MemFs, Survival};
use crate::vfs::{Fs, OpenMode};
use crate::wal::format::{SEGMENT_HEADER_LEN, segment_name};
use crate::wal::{PartitionSeqno, RecoveryMode, WalReplayOptions, WalReplayReport};

const MODES: [(&str, RecoveryMode); 3] = [
    ("strict", RecoveryMode::Strict),
    ("point-in-time", RecoveryMode::PointInTime),
    ("salvage", RecoveryMode::Salvage),
];

/// A commit that was appended.
struct WrittenCommit {
    file: FileNumber,
    frame: Range<u64>,
    count: u32,
}

struct WalReaderScript {
    mem_fs: MemFs,
    segment_size: u64,
    mapped: bool,
    opens: u64,
    wal: Option<WalFixture>,
    /// By first sequence number. A number that was assigned again has its last commit.
    written: BTreeMap<u64, WrittenCommit>,
    payload_len: usize,
}

impl WalReaderScript {
    fn new(words: &[&str]) -> WalReaderScript {
        let mut script = WalReaderScript {
            mem_fs: MemFs::new(),
            segment_size: 8192,
            mapped: words.contains(&"mapped"),
            opens: 0,
            wal: None,
            written: BTreeMap::new(),
            payload_len: 60,
        };
        script.segment_size = option(words, "segment").unwrap_or(8192);
        script.open(RecoveryMode::Strict, u64::MAX).expect("an empty WAL is opened");
        script
    }

    fn fs(&self) -> Arc<dyn Fs> {
        Arc::new(self.mem_fs.clone())
    }

    fn open(&mut self, mode: RecoveryMode, refuse_at: u64) -> Result<()> {
        self.wal = None;
        self.opens += 1;
        let options = wal_options(self.segment_size, self.mapped);
        self.wal = Some(WalFixture::open_with_mode(self.fs(), options, self.opens, mode, refuse_at)?);
        Ok(())
    }

    fn run_command(&mut self, command: &str, words: &[&str], output: &mut String) {
        match command {
            "wal" => *self = WalReaderScript::new(words),
            "write" => words.iter().for_each(|word| self.write(word)),
            "segments" => self.show_segments(output),
            "open" => {
                let mode = modes(words)[0].1;
                let opened = self.open(mode, option(words, "refuse").unwrap_or(u64::MAX));
                let replayed = opened.map(|()| self.show_commits(&self.wal.as_ref().expect("it was opened").replayed));
                writeln!(output, "open: {}", replayed.unwrap_or_else(|error| show_error(&error))).unwrap();
            }
            "power-loss" => {
                self.wal = None;
                let survival = match words.first() {
                    None => Survival::Nothing,
                    Some(&"data-only") => Survival::DataOnly,
                    Some(&"metadata-only") => Survival::MetadataOnly,
                    Some(other) => panic!("there is no survival {other:?}"),
                };
                self.mem_fs.crash(survival, 1);
            }
            "replay" => self.replay(words, output),
            _ => self.damage(command, words),
        }
    }

    fn write(&mut self, word: &str) {
        let wal = self.wal.as_ref().expect("the WAL is open");
        match word.split_once('=').unwrap_or((word, "")) {
            ("len", bytes) => self.payload_len = bytes.parse().expect("a length"),
            ("sync", _) => wal.sync(),
            ("seal", _) => wal.wal.seal().unwrap(),
            ("sync-sealed", _) => _ = wal.wal.sync_sealed(true).unwrap(),
            ("retire", seqno) => _ = wal.retire(SeqNo(seqno.parse().expect("a sequence number"))).unwrap(),
            (count, _) => {
                let last = |wal: &WalFixture| *wal.wal.segments().last().expect("there is a segment");
                let (before, next) = (last(wal), wal.wal.appended().0 + 1);
                let payload = payload(next, self.payload_len);
                let (first, count, _) = wal.append(count.parse().expect("a count"), &payload).unwrap();
                let after = last(wal);
                let start = if before.file == after.file { before.end_offset } else { SEGMENT_HEADER_LEN as u64 };
                self.written.insert(first, WrittenCommit { file: after.file, frame: start..after.end_offset, count });
            }
        }
    }

    fn damage(&self, command: &str, words: &[&str]) {
        let fs = self.fs();
        let commit = || &self.written[&words[0].parse::<u64>().expect("a sequence number")];
        let path = |name: &str| dir().join(name);
        let path_of = |commit: &WrittenCommit| dir().join(segment_name(commit.file));
        match command {
            "flip" => flip_byte(&fs, &path_of(commit()), option(words, "at").unwrap_or(commit().frame.end - 9)),
            "zero" => {
                let len = words[1].parse().expect("a length");
                overwrite(&fs, &path_of(commit()), commit().frame.start, &vec![0; len]);
            }
            "cut" => {
                fs.open(&path_of(commit()), OpenMode::Write).unwrap().set_length(commit().frame.start).unwrap();
            }
            "erase" => {
                let len = file_bytes(&fs, &path(words[0])).len() - SEGMENT_HEADER_LEN;
                overwrite(&fs, &path(words[0]), SEGMENT_HEADER_LEN as u64, &vec![0; len]);
            }
            "remove" => fs.remove_file(&path(words[0])).unwrap(),
            "copy" => fs.hard_link(&path(words[0]), &path(words[1])).unwrap(),
            "version" => {
                let mut head = file_bytes(&fs, &path(words[0]))[..64].to_vec();
                head[8] = words[1].parse().expect("a byte");
                let sum = crate::base::checksum::xxh3(0, &head[..56]);
                head[56..].copy_from_slice(&sum.to_le_bytes());
                overwrite(&fs, &path(words[0]), 0, &head);
            }
            "junk" => fs.open(&path(words[0]), OpenMode::Create).unwrap().write_at(&[0xaa; 600], 0).unwrap(),
            other => panic!("there is no command {other:?}"),
        }
    }

    fn replay(&self, words: &[&str], output: &mut String) {
        for (name, mode) in modes(words) {
            match self.replay_with(*mode, words) {
                Ok((commits, report)) => {
                    writeln!(output, "{name}: {}{}", self.show_commits(&commits), show_report(&report)).unwrap();
                }
                Err(error) => {
                    let advice = if words.contains(&"advice") { format!("\n  {}", error.message()) } else { "".into() };
                    writeln!(output, "{name}: {}{advice}", show_error(&error)).unwrap();
                }
            }
        }
    }

    fn replay_with(&self, mode: RecoveryMode, words: &[&str]) -> Result<(Vec<OwnedWalCommit>, WalReplayReport)> {
        let fs = self.fs();
        let known = load_manifest_state(&fs)?;
        let number = |name| option(words, name).unwrap_or(0);
        let mut options = WalReplayOptions {
            mode,
            listed_segments: known.listed_segments.into_iter().collect(),
            wal_end: known.wal_end,
            flushed_through: SeqNo(number("flushed")),
            durable_through: PartitionSeqno { seqno: SeqNo(number("durable")), partition: "partition \"a\"".into() },
            held_in_pools: PartitionSeqno { seqno: SeqNo(number("held")), partition: "partition \"b\"".into() },
            ..WalReplayOptions::default()
        };
        let pair = |text: &str| text.split_once(':').map(|(a, b)| (a.parse().unwrap(), b.parse().unwrap())).unwrap();
        let text = |name: &str| words.iter().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        if let Some(list) = text("list") {
            let epochs = list.split(',').map(pair).map(|(epoch, file)| (WalEpoch(epoch), FileNumber(file)));
            options.listed_segments = epochs.collect();
        }
        if let Some(end) = text("end").map(pair) {
            options.wal_end = Some((WalEpoch(end.0), SeqNo(end.1)));
        }
        let database = option(words, "database").map_or(DATABASE, |byte| [byte as u8; 16]);
        let refuse_at = option(words, "refuse").unwrap_or(u64::MAX);
        replay_with_options(&fs, database, options, refuse_at)
    }

    /// The sequence numbers of commits as ranges. Checks their payloads.
    fn show_commits(&self, commits: &[OwnedWalCommit]) -> String {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        for (first, count, found) in commits {
            assert_eq!((*count, found), (self.written[first].count, &payload(*first, found.len())), "a wrong payload");
            let last = first + u64::from(*count) - 1;
            match ranges.last_mut().filter(|range| range.1 + 1 == *first) {
                Some(range) => range.1 = last,
                None => ranges.push((*first, last)),
            }
        }
        let texts: Vec<String> = ranges.iter().map(|(first, last)| format!("{first}-{last}")).collect();
        format!("{} commits {}", commits.len(), if texts.is_empty() { "(none)".into() } else { texts.join(" ") })
    }

    fn show_segments(&self, output: &mut String) {
        let wal = &self.wal.as_ref().expect("the WAL is open").wal;
        for info in wal.segments() {
            write!(output, "{} epoch {} from {}:", segment_name(info.file), info.epoch.0, info.first_seqno.0).unwrap();
            for (first, commit) in self.written.iter().filter(|(_, commit)| commit.file == info.file) {
                let last = first + u64::from(commit.count) - 1;
                write!(output, " {first}-{last}@{}", commit.frame.start).unwrap();
            }
            writeln!(output, " end {}", info.end_offset).unwrap();
        }
        writeln!(output, "synced through {}", wal.durable().0).unwrap();
    }
}

/// The number in `NAME=NUMBER`.
fn option(words: &[&str], name: &str) -> Option<u64> {
    let value = words.iter().find_map(|word| word.strip_prefix(name)?.strip_prefix('='))?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name}={value} is no number")))
}

/// The modes that the words name; all if they name none.
fn modes(words: &[&str]) -> &'static [(&'static str, RecoveryMode)] {
    match MODES.iter().position(|(name, _)| words.contains(name)) {
        Some(at) => &MODES[at..=at],
        None => &MODES,
    }
}

/// The payload of a commit, which its sequence number determines.
fn payload(first: u64, len: usize) -> Vec<u8> {
    (0..len).map(|at| (first * 17 + at as u64 * 31) as u8).collect()
}

fn show_report(report: &WalReplayReport) -> String {
    let mut text = format!(", end {} in epoch {}", report.last_seqno, report.last_epoch.0);
    if report.has_gaps {
        text += ", with gaps";
    }
    if let Some(dropped) = &report.dropped_after_damage {
        let place = show_place(Some(&dropped.file), Some(dropped.offset));
        write!(text, ", dropped {} frames behind {place}", dropped.frames).unwrap();
    }
    if !report.spare_files.is_empty() {
        let files: Vec<String> = report.spare_files.iter().map(|file| segment_name(*file)).collect();
        write!(text, ", spare {}", files.join(" ")).unwrap();
    }
    text
}

fn show_error(error: &Error) -> String {
    format!("{:?} in {}", error.kind(), show_place(error.file(), error.offset()))
}

fn show_place(file: Option<&Path>, offset: Option<u64>) -> String {
    let name = file.and_then(Path::file_name).map(|name| PathBuf::from(name).display().to_string());
    let name = name.unwrap_or_else(|| "no file".into());
    offset.map_or_else(|| name.clone(), |offset| format!("{name}@{offset}"))
}

#[test]
fn reader_script() {
    let mut script = WalReaderScript::new(&[]);
    check_component_script("wal_reader", |command, words, output| script.run_command(command, words, output));
}
