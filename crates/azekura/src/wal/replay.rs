//! Reading the log back.

use std::path::Path;
use std::sync::Arc;

use crate::base::Result;
use crate::vfs::Fs;
use crate::wal::options::{RecoveryMode, WalReplayOptions, WalReplayReport};
use crate::wal::reader::{ApplyCommit, WalReader};
use crate::wal::salvage::salvage_segments;
use crate::wal::segment_set::find_segments;

/// Reads the log in order and hands each commit to `apply`. Writes nothing. Memory: two MiB, one frame (16 MiB at most)
/// and one commit.
///
/// # Errors
/// `Corruption` with the file and the offset for damage that the mode does not let pass, or behind which the mode
/// cannot find one moment of all partitions; `Unsupported` if a newer
/// version wrote something; what `apply` fails with.
pub(crate) fn replay(
    fs: Arc<dyn Fs>,
    dir: &Path,
    database_id: [u8; 16],
    options: WalReplayOptions,
    apply: &mut ApplyCommit<'_>,
) -> Result<WalReplayReport> {
    let segments = find_segments(&*fs, dir, database_id, &options)?;
    let mut reader = WalReader::new(&segments, &options, dir, apply);
    if options.mode == RecoveryMode::Salvage {
        salvage_segments(&mut reader)?
    } else {
        reader.read_linked_segments()?
    }
    Ok(reader.into_report())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    use crate::base::ErrorKind;
    use crate::base::SeqNo;
    use crate::base::version_edit::WalEpoch;
    use crate::vfs::OpenMode;
    use crate::vfs::mem::{MemFs, Survival};
    use crate::vfs::seeded_rng::SeededRng;
    use crate::wal::testing::{
        DATABASE, OwnedWalCommit, WalFixture, dir, file_bytes, flip_byte, load_manifest_state, overwrite,
        random_length, random_payload, replay_from, replay_with_mode, wal_options,
    };

    fn mem_fs() -> (MemFs, Arc<dyn Fs>) {
        let fs = MemFs::new();
        (fs.clone(), Arc::new(fs))
    }

    fn open_wal(fs: &Arc<dyn Fs>, size: u64) -> WalFixture {
        WalFixture::open(Arc::clone(fs), wal_options(size, false), 1).unwrap()
    }

    #[test]
    fn random_commits_come_back_over_several_opens() {
        for (seed, mapped) in [(1, false), (2, true), (3, false), (4, true)] {
            let (_, fs) = mem_fs();
            let mut rng = SeededRng::new(seed, 0);
            let mut wrote: Vec<OwnedWalCommit> = Vec::new();
            for generation in 0..5 {
                let mini = WalFixture::open(Arc::clone(&fs), wal_options(4096, mapped), generation).unwrap();
                assert_eq!(mini.replayed, wrote);
                for _ in 0..rng.below(60) {
                    let len = random_length(&mut rng);
                    wrote.push(mini.append(1 + rng.below(5) as u32, &random_payload(&mut rng, len)).unwrap());
                    match rng.below(9) {
                        0 => mini.sync(),
                        1 => mini.wal.seal().unwrap(),
                        2 => drop(mini.wal.sync_sealed(true).unwrap()),
                        _ => {}
                    }
                }
                let segments = mini.wal.segments();
                assert!(segments.windows(2).all(|pair| pair[0].last_seqno.0 + 1 == pair[1].first_seqno.0));
                assert_eq!(replay_with_mode(&fs, RecoveryMode::Strict).unwrap().1.segments.len(), segments.len());
            }
            assert_eq!(replay_with_mode(&fs, RecoveryMode::Salvage).unwrap().0, wrote);
            assert_eq!(replay_with_mode(&fs, RecoveryMode::PointInTime).unwrap().0, wrote);
        }
    }

    /// Checks what reading a damaged log gave: a prefix, or an error that names a file.
    fn expect_prefix_or_error(
        what: &str,
        result: Result<(Vec<OwnedWalCommit>, WalReplayReport)>,
        wrote: &[OwnedWalCommit],
    ) -> Option<usize> {
        match result {
            Ok((commits, report)) => {
                assert!(wrote.starts_with(&commits), "{what}: not a prefix");
                let end = commits.last().map_or(0, |(first, count, _)| first + u64::from(*count) - 1);
                assert_eq!(report.last_seqno, SeqNo(end), "{what}");
                Some(commits.len())
            }
            Err(e) => {
                assert!(matches!(e.kind(), ErrorKind::Corruption | ErrorKind::Unsupported), "{what}: {e}");
                assert!(e.file().is_some(), "{what}: {e} names no file");
                None
            }
        }
    }

    /// Ten commits over two segments; all but the last three synced, with a watermark frame behind the sync.
    fn small_wal(fs: &Arc<dyn Fs>) -> (WalFixture, Vec<OwnedWalCommit>) {
        let mini = open_wal(fs, 4096);
        let mut rng = SeededRng::new(9, 9);
        let mut wrote = Vec::new();
        for i in 0..10 {
            wrote.push(mini.append(1 + i % 3, &random_payload(&mut rng, 30 + 7 * i as usize)).unwrap());
            if i == 3 {
                mini.wal.seal().unwrap();
            }
            if i == 6 {
                mini.sync();
            }
        }
        (mini, wrote)
    }

    #[test]
    fn flipped_byte_never_loses_synced_commits() {
        let (mem, fs) = mem_fs();
        let (mini, wrote) = small_wal(&fs);
        let (durable, segments) = (mini.wal.durable().0, mini.wal.segments());
        let synced = wrote.iter().filter(|(first, ..)| *first <= durable).count();
        assert_eq!((synced, segments.len()), (7, 2));
        let (mut dropped, mut corrupt) = (0, 0);
        for (at, info) in segments.iter().enumerate() {
            for offset in 0..info.end_offset + 16 {
                let copy: Arc<dyn Fs> = Arc::new(mem.fork());
                flip_byte(&copy, &mini.segment_path_at(at), offset);
                let what = format!("segment {at} byte {offset}");
                let strict = replay_with_mode(&copy, RecoveryMode::Strict);
                let report = strict.as_ref().ok().map(|(_, report)| report.clone());
                match expect_prefix_or_error(&what, strict, &wrote) {
                    Some(n) => assert!(n >= synced, "{what}: lost what was synced"),
                    None => corrupt += 1,
                }
                if let Some(found) = report.and_then(|report| report.dropped_after_damage) {
                    assert!(found.frames > 0 && found.file == mini.segment_path_at(at) && found.offset <= offset);
                    dropped += 1;
                }
                let point = replay_with_mode(&copy, RecoveryMode::PointInTime);
                expect_prefix_or_error(&what, point, &wrote).or_else(|| (offset < 512).then_some(0)).expect(&what);
                let salvaged =
                    replay_with_mode(&copy, RecoveryMode::Salvage).map(|(commits, _)| commits).unwrap_or_default();
                assert!(salvaged.iter().all(|commit| wrote.contains(commit)), "{what}: a wrong payload");
                assert!(offset < 512 || salvaged.len() + 1 >= wrote.len(), "{what}: salvage lost more than one");
            }
        }
        assert!(corrupt > 400 && dropped > 50, "{corrupt} {dropped}");
    }

    #[test]
    fn truncated_segment_gives_prefix_or_error() {
        let (mem, fs) = mem_fs();
        let (mini, wrote) = small_wal(&fs);
        for (at, info) in mini.wal.segments().iter().enumerate() {
            for len in 0..info.end_offset {
                let copy: Arc<dyn Fs> = Arc::new(mem.fork());
                copy.open(&mini.segment_path_at(at), OpenMode::Write).unwrap().set_length(len).unwrap();
                let read = expect_prefix_or_error(
                    &format!("segment {at} cut at {len}"),
                    replay_with_mode(&copy, RecoveryMode::Strict),
                    &wrote,
                );
                assert!(at == 1 || read.is_none_or(|n| n == wrote.len()), "the first segment was synced");
            }
        }
    }

    #[test]
    fn lost_page_below_watermark_is_corruption() {
        let (mem, fs) = mem_fs();
        let mini = open_wal(&fs, 1 << 20);
        let mut rng = SeededRng::new(1, 1);
        let wrote: Vec<OwnedWalCommit> =
            (0..100).map(|_| mini.append(1, &random_payload(&mut rng, 300)).unwrap()).collect();
        mini.sync();
        overwrite(&fs, &mini.segment_path_at(0), 8192, &[0; 4096]);
        let error = replay_with_mode(&fs, RecoveryMode::Strict).unwrap_err();
        assert_eq!((error.kind(), error.file()), (ErrorKind::Corruption, Some(mini.segment_path_at(0).as_path())));
        assert!((7800..8192).contains(&error.offset().unwrap()));
        let (point, report) = replay_with_mode(&fs, RecoveryMode::PointInTime).unwrap();
        assert!(wrote.starts_with(&point) && point.len() > 20 && point.len() < 30);
        assert!(report.dropped_after_damage.unwrap().frames > 50);
        let (salvaged, _) = replay_with_mode(&fs, RecoveryMode::Salvage).unwrap();
        assert!(salvaged.len() > 80 && salvaged.iter().all(|commit| wrote.contains(commit)));
        assert!(salvaged.is_sorted());
        drop(mem);
    }

    #[test]
    fn damage_before_last_two_segments_is_corruption() {
        let (_, fs) = mem_fs();
        let mini = open_wal(&fs, 4096);
        for _ in 0..3 {
            mini.append(1, &[7; 500]).unwrap();
            mini.wal.seal().unwrap();
        }
        // The rest of the log says nothing: only the headers do.
        for segment in 1..3 {
            let path = mini.segment_path_at(segment);
            let len = file_bytes(&fs, &path).len();
            overwrite(&fs, &path, 512, &vec![0; len - 512]);
        }
        let end = mini.wal.segments()[0].end_offset;
        flip_byte(&fs, &mini.segment_path_at(0), end - 20);
        assert_eq!(
            replay_with_mode(&fs, RecoveryMode::Strict).unwrap_err().file(),
            Some(mini.segment_path_at(0).as_path())
        );
    }

    #[test]
    fn torn_tails_of_several_opens_are_not_damage() {
        let (_, fs) = mem_fs();
        let mut kept: Vec<OwnedWalCommit> = Vec::new();
        for generation in 0..6 {
            let mini = open_wal(&fs, 8192);
            assert_eq!(mini.replayed, kept, "generation {generation}");
            for i in 0..4 {
                kept.push(mini.append(2, &[generation; 90]).unwrap());
                if i == 1 {
                    mini.sync();
                }
            }
            // The fifth commit is torn, and a sixth behind it is whole.
            let start = mini.wal.segments().last().unwrap().end_offset;
            mini.append(1, &[1; 50]).unwrap();
            mini.append(1, &[2; 50]).unwrap();
            let segment = mini.wal.segments().len() - 1;
            flip_byte(&fs, &mini.segment_path_at(segment), start + 30);
        }
        let (commits, report) = replay_with_mode(&fs, RecoveryMode::Strict).unwrap();
        assert_eq!(commits, kept);
        assert_eq!(report.dropped_after_damage.unwrap().frames, 1);
        assert_eq!(
            replay_with_mode(&fs, RecoveryMode::Salvage).unwrap().0[..kept.len()],
            kept,
            "and salvage takes the cut too"
        );
    }

    #[test]
    fn wal_ended_by_caller_stays_ended() {
        let (_, fs) = mem_fs();
        let mini = open_wal(&fs, 8192);
        let mut kept: Vec<OwnedWalCommit> = (0..8).map(|i| mini.append(1, &[i; 60]).unwrap()).collect();
        kept.truncate(5);
        for generation in 0..3 {
            // The first open refuses commit 6; later ones must not find it again.
            let refuse_at = if generation == 0 { 6 } else { u64::MAX };
            let mini = WalFixture::open_with_mode(
                Arc::clone(&fs),
                wal_options(8192, false),
                generation,
                RecoveryMode::Strict,
                refuse_at,
            );
            let mini = mini.unwrap();
            assert_eq!(mini.replayed, kept, "generation {generation}");
            kept.push(mini.append(1, &[99; 70]).unwrap());
            kept.push(mini.append(1, &[98; 70]).unwrap());
        }
    }

    #[test]
    fn refused_synced_commit_is_manifest_corruption() {
        let (_, fs) = mem_fs();
        let mini = open_wal(&fs, 8192);
        for i in 0..8 {
            mini.append(1, &[i; 60]).unwrap();
        }
        mini.sync();
        let error = replay_from(&fs, RecoveryMode::Strict, SeqNo::ZERO, 6).unwrap_err();
        assert_eq!((error.kind(), error.file()), (ErrorKind::Corruption, Some(dir().join("MANIFEST").as_path())));
    }

    /// An open that passed over damage noted an end behind a segment in which nothing counts, and which is gone. The
    /// log behind it looked damaged. The next open would not know that end: the log has to be written anew.
    #[test]
    fn noted_end_leads_to_the_segment_behind() {
        let (_, fs) = mem_fs();
        let mini = open_wal(&fs, 8192);
        let mut wrote: Vec<OwnedWalCommit> = (0..3).map(|i| mini.append(1, &[i; 60]).unwrap()).collect();
        mini.sync();
        mini.wal.seal().unwrap();
        let empty = mini.wal.segments()[1];
        let path = mini.segment_path_at(1);
        drop(mini);
        let mini = open_wal(&fs, 8192);
        wrote.extend((3..6).map(|i| mini.append(1, &[i; 60]).unwrap()));
        mini.sync();
        fs.remove_file(&path).unwrap();
        let mut known = load_manifest_state(&fs).unwrap();
        known.listed_segments.remove(&empty.epoch);
        for mode in [RecoveryMode::Strict, RecoveryMode::PointInTime] {
            let (live, log_end) = (known.listed_segments.clone().into_iter().collect(), Some((empty.epoch, SeqNo(3))));
            let options =
                WalReplayOptions { mode, listed_segments: live, wal_end: log_end, ..WalReplayOptions::default() };
            let mut read = Vec::new();
            let report = replay(Arc::clone(&fs), dir(), DATABASE, options, &mut |commit| {
                read.push((commit.first_seqno.0, commit.seqno_count, commit.payload.to_vec()));
                Ok(None)
            });
            let report = report.unwrap_or_else(|e| panic!("{mode:?}: {e}"));
            assert_eq!((&read, report.last_seqno), (&wrote, SeqNo(6)), "{mode:?}");
            assert!(report.has_gaps, "{mode:?}: no later replay could link the two");
        }
    }

    /// A clean close retires all segments but one that it has just begun. Power loss took the header of that one, and
    /// nothing else said that what came before the noted end was retired: the log looked damaged.
    #[test]
    fn retired_log_is_whole_without_a_header() {
        let (_, fs) = mem_fs();
        let mini = open_wal(&fs, 8192);
        (0..3).for_each(|i| drop(mini.append(1, &[i; 60]).unwrap()));
        mini.sync();
        let old = mini.wal.segments()[0].file;
        mini.wal.seal().unwrap();
        assert_eq!(mini.retire(SeqNo(3)).unwrap(), 1);
        let epoch = mini.wal.segments()[0].epoch;
        fs.remove_file(&mini.segment_path_at(0)).unwrap();
        // The file of the new segment still has the header of its life before.
        let (live, log_end) = (vec![(epoch, old)], Some((epoch, SeqNo(3))));
        let options = WalReplayOptions { listed_segments: live, wal_end: log_end, ..WalReplayOptions::default() };
        let report = replay(Arc::clone(&fs), dir(), DATABASE, options, &mut |_| panic!("no commit counts")).unwrap();
        assert_eq!((report.last_seqno, report.has_gaps), (SeqNo(3), false));
    }

    #[test]
    fn point_in_time_recovery_lasts() {
        let (_, fs) = mem_fs();
        let (mini, wrote) = small_wal(&fs);
        flip_byte(&fs, &mini.segment_path_at(0), 700);
        drop(mini);
        assert!(WalFixture::open(Arc::clone(&fs), wal_options(4096, false), 5).is_err());
        let mini = WalFixture::open_with_mode(
            Arc::clone(&fs),
            wal_options(4096, false),
            5,
            RecoveryMode::PointInTime,
            u64::MAX,
        )
        .unwrap();
        let mut kept = mini.replayed.clone();
        assert!(wrote.starts_with(&kept) && kept.len() < 4);
        kept.push(mini.append(1, b"afterwards").unwrap());
        mini.sync();
        drop(mini);
        for generation in 0..3 {
            let mini = WalFixture::open(Arc::clone(&fs), wal_options(4096, false), generation).unwrap();
            assert_eq!(mini.replayed, kept);
            kept.push(mini.append(1, b"more").unwrap());
        }
    }

    #[test]
    fn error_names_missing_or_foreign_segment() {
        let (mem, fs) = mem_fs();
        let (mini, _) = small_wal(&fs);
        let kind_and_file = |fs: &Arc<dyn Fs>| {
            let error = replay_with_mode(fs, RecoveryMode::Strict).unwrap_err();
            (error.kind(), error.file().map(PathBuf::from))
        };
        for at in 0..2 {
            let copy: Arc<dyn Fs> = Arc::new(mem.fork());
            copy.remove_file(&mini.segment_path_at(at)).unwrap();
            assert_eq!(kind_and_file(&copy), (ErrorKind::Corruption, Some(mini.segment_path_at(at))), "missing");
        }
        let copy: Arc<dyn Fs> = Arc::new(mem.fork());
        copy.hard_link(&mini.segment_path_at(1), &dir().join("000777.wal")).unwrap();
        let error = replay_with_mode(&copy, RecoveryMode::Strict).unwrap_err();
        assert!(error.message().contains("epoch") && error.message().contains(".wal"), "{error}");

        let live = load_manifest_state(&fs).unwrap().listed_segments.into_iter().collect();
        let options = WalReplayOptions { listed_segments: live, ..WalReplayOptions::default() };
        let error = replay(Arc::clone(&fs), dir(), [1; 16], options, &mut |_| Ok(None)).unwrap_err();
        assert!(error.message().contains("another database") && error.file().is_some());

        let mut head = file_bytes(&fs, &mini.segment_path_at(0))[..64].to_vec();
        head[8] = 9;
        let sum = crate::base::checksum::xxh3(0, &head[..56]);
        head[56..].copy_from_slice(&sum.to_le_bytes());
        overwrite(&fs, &mini.segment_path_at(0), 0, &head);
        assert_eq!(kind_and_file(&fs), (ErrorKind::Unsupported, Some(mini.segment_path_at(0))));
    }

    #[test]
    fn unknown_files_are_ignored_and_never_recycled() {
        let (_, fs) = mem_fs();
        let (mini, wrote) = small_wal(&fs);
        for name in ["7.wal", "x.wal", "0000001.wal", "000900.wal"] {
            create_file_with(&fs, name, &[0xaa; 600]);
        }
        let (commits, report) = replay_with_mode(&fs, RecoveryMode::Strict).unwrap();
        assert_eq!(commits, wrote);
        assert_eq!(report.spare_files, []);
        assert_eq!(report.segments, mini.wal.segments());
    }

    fn create_file_with(fs: &Arc<dyn Fs>, name: &str, bytes: &[u8]) {
        fs.open(&dir().join(name), OpenMode::Create).unwrap().write_at(bytes, 0).unwrap();
    }

    #[test]
    fn flushed_records_are_replayed_up_to_wal_end() {
        let (_, fs) = mem_fs();
        let (_mini, wrote) = small_wal(&fs);
        let (commits, report) = replay_from(&fs, RecoveryMode::Strict, SeqNo(4), u64::MAX).unwrap();
        assert_eq!((commits, report.commits), (wrote, 10));
        let (none, report) = replay_from(&mem_fs().1, RecoveryMode::Strict, SeqNo(40), u64::MAX).unwrap();
        assert_eq!((none.len(), report.last_seqno, report.last_epoch), (0, SeqNo(40), WalEpoch(0)));
    }

    /// Runs a random history, crashes it in many ways at its end, and checks each outcome.
    fn crash_and_replay(seed: u64, mapped: bool) {
        let mem = MemFs::new();
        let fs: Arc<dyn Fs> = Arc::new(mem.clone());
        let mut rng = SeededRng::new(seed, 77);
        let mut kept: Vec<OwnedWalCommit> = Vec::new();
        let mut retired = SeqNo::ZERO;
        for generation in 0..4 {
            let mini = WalFixture::open(Arc::clone(&fs), wal_options(4096, mapped), seed * 10 + generation).unwrap();
            let base = mini.replayed.first().map_or(0, |(first, ..)| first - 1);
            let expect: Vec<OwnedWalCommit> = kept.iter().filter(|(first, ..)| *first > base).cloned().collect();
            if !mini.replayed.is_empty() {
                assert_eq!(mini.replayed, expect, "seed {seed} generation {generation}");
            }
            let mut durable = mini.wal.durable();
            for _ in 0..rng.below(50) {
                let len = random_length(&mut rng);
                kept.push(mini.append(1 + rng.below(3) as u32, &random_payload(&mut rng, len)).unwrap());
                match rng.below(8) {
                    0 => mini.sync(),
                    1 => drop(mini.wal.sync_sealed(true).unwrap()),
                    2 => {
                        retired = mini.wal.durable();
                        mini.retire(retired).unwrap();
                    }
                    _ => {}
                }
                durable = mini.wal.durable();
            }
            for (way, survival) in
                [Survival::Random, Survival::Nothing, Survival::DataOnly, Survival::MetadataOnly, Survival::Everything]
                    .into_iter()
                    .cycle()
                    .take(12)
                    .enumerate()
            {
                let crashed = mem.fork();
                crashed.crash(survival, seed ^ (way as u64) << 20);
                let fs: Arc<dyn Fs> = Arc::new(crashed);
                check_after_crash(&fs, &kept, durable, retired, &format!("seed {seed} {survival:?} way {way}"));
            }
            drop(mini);
            mem.crash(Survival::Random, seed + generation);
            let (left, report) = replay_with_mode(&fs, RecoveryMode::Strict).unwrap();
            let end = left.last().map_or(report.last_seqno.0, |(first, count, _)| first + u64::from(*count) - 1);
            kept.retain(|(first, ..)| *first <= end);
        }
    }

    fn check_after_crash(fs: &Arc<dyn Fs>, wrote: &[OwnedWalCommit], durable: SeqNo, retired: SeqNo, what: &str) {
        let (left, report) = replay_with_mode(fs, RecoveryMode::Strict).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert!(report.last_seqno >= durable, "{what}: {} was durable, {} is left", durable, report.last_seqno);
        if let Some((first, ..)) = left.first() {
            assert!(*first <= retired.0 + 1, "{what}: a hole in front");
            let start = wrote.iter().position(|commit| commit.0 == *first).unwrap();
            assert!(wrote[start..].starts_with(&left), "{what}: not a prefix");
        }
        // And it opens, takes writes, and opens again.
        let mini =
            WalFixture::open(Arc::clone(fs), wal_options(4096, false), 3).unwrap_or_else(|e| panic!("{what}: {e}"));
        let new = mini.append(1, b"after the crash").unwrap();
        mini.sync();
        drop(mini);
        let again =
            WalFixture::open(Arc::clone(fs), wal_options(4096, false), 4).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(again.replayed.last(), Some(&new), "{what}");
    }

    #[test]
    fn power_loss_leaves_prefix_with_all_durable() {
        for seed in 0..24 {
            crash_and_replay(seed, seed % 2 == 0);
        }
    }

    #[test]
    fn power_loss_at_every_operation() {
        let run = |mem: &MemFs| -> (Vec<OwnedWalCommit>, SeqNo, SeqNo) {
            let fs: Arc<dyn Fs> = Arc::new(mem.clone());
            let (mut wrote, mut durable, mut retired) = (Vec::new(), SeqNo::ZERO, SeqNo::ZERO);
            let Ok(mini) = WalFixture::open(fs, wal_options(4096, false), 1) else { return (wrote, durable, retired) };
            for i in 0..30u8 {
                let first = mini.wal.appended().plus(1).0;
                wrote.push((first, 1, vec![i; 500]));
                if mini.append(1, &[i; 500]).is_err() {
                    break;
                }
                let done = match i % 5 {
                    1 => mini.wal.sync(mini.wal.appended(), i % 2 == 0),
                    3 => mini.wal.sync_sealed(true).map(drop),
                    4 => {
                        retired = mini.wal.durable();
                        mini.retire(retired).map(drop)
                    }
                    _ => Ok(()),
                };
                durable = mini.wal.durable();
                if done.is_err() {
                    break;
                }
            }
            (wrote, durable, retired)
        };
        let whole = MemFs::new();
        run(&whole);
        let ops = whole.op_count();
        assert!(ops > 60, "{ops}");
        for op in 0..ops {
            let mem = MemFs::new();
            mem.freeze_after(Some(op));
            let (wrote, durable, retired) = run(&mem);
            for (seed, survival) in
                [Survival::Nothing, Survival::Everything, Survival::Random, Survival::Random].into_iter().enumerate()
            {
                let crashed = mem.fork();
                crashed.crash(survival, op * 7 + seed as u64);
                let fs: Arc<dyn Fs> = Arc::new(crashed);
                check_after_crash(&fs, &wrote, durable, retired, &format!("operation {op} {survival:?} {seed}"));
            }
        }
    }
}
