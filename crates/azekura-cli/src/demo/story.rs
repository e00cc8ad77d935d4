//! The demo from beginning to end.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::check::{self, Check};
use super::ledger::Ledger;
use super::message::Counters;
use super::options::{self, DemoArgs, INPUT_BYTES_ENOUGH};
use super::plan::{LeftOut, Plan, Walk};
use super::scratch::{self, Scratch};
use super::session::{Outcome, Session};
use super::snapshot_check;
use super::summary::{Recovery, Summary};
use super::version;
use crate::command::verify;
use crate::display::{bytes, count, duration, plural};
use crate::failure::{Answer, Failure, Result};
use crate::output::Output;
use crate::progress::Progress;

/// Runs the demo; the answer is yes only if everything held.
pub(crate) fn run(args: &DemoArgs, output: &mut Output) -> Result<Answer> {
    scratch::catch_interrupts()?;
    let started = Instant::now();
    let scratch = Scratch::create()?;
    let mut story = Story::begin(args, &scratch, started, output)?;
    story.write_and_crash()?;
    story.recover()?;
    story.go_on_writing()?;
    story.read_everything()?;
    story.check_files()?;
    story.tell_end(args)
}

struct Story<'a> {
    output: &'a mut Output,
    started: Instant,
    /// For all writing together.
    write_time: Duration,
    db: PathBuf,
    memtable_bytes: u64,
    plan: Plan,
    ledger: Ledger,
    left_out: LeftOut,
    checks: Vec<Check>,
    summary: Summary,
}

impl Story<'_> {
    fn begin<'a>(args: &DemoArgs, scratch: &Scratch, started: Instant, output: &'a mut Output) -> Result<Story<'a>> {
        let db = match &args.db {
            Some(path) => fresh_directory(path)?,
            None => scratch.path().join("db"),
        };
        let total = Duration::from_secs(args.seconds);
        let mut plan = plan_input(args, scratch, &db, started + total / 6, output.json())?;
        let sample = plan.files == 0;
        if sample {
            plan = plan_sample(scratch, output.json())?;
        }
        let mut story = Story {
            output,
            started,
            write_time: total * 2 / 5,
            db,
            memtable_bytes: args.memtable_bytes,
            left_out: std::mem::take(&mut plan.left_out),
            plan,
            ledger: Ledger::create(&scratch.path().join("ledger"))?,
            checks: Vec::new(),
            summary: Summary::default(),
        };
        let what = format!("{}, {}", plural(story.plan.files, "file"), bytes(story.plan.bytes));
        let from = if sample {
            "made up, because there are none".to_string()
        } else {
            format!("below {}", story.plan.root.display())
        };
        story.say(format!("{what} {from}"))?;
        Ok(story)
    }

    fn write_and_crash(&mut self) -> Result<()> {
        let outcome = self.run_session(Some(self.bytes_to_write() / 2), self.write_time / 2)?;
        let c = &outcome.counters;
        let detail = format!(
            "process {} after {} ({}) and {}",
            outcome.process,
            plural(self.ledger.stored, "acknowledged put"),
            bytes(self.ledger.bytes),
            plural(c.flushes, "flushed memtable"),
        );
        self.summary.counters = *c;
        self.conclude(
            "the writer was killed with SIGKILL, after a first flush",
            outcome.killed && c.flushes > 0,
            detail,
        )
    }

    fn recover(&mut self) -> Result<()> {
        let opening = Instant::now();
        let (db, partition) = options::open(&self.db, self.memtable_bytes)?;
        let took = opening.elapsed();
        let replayed = db.metrics().replayed_records;
        self.summary.recovery = Recovery { took, replayed, acknowledged: self.ledger.stored };
        let progress = Progress::bytes(self.output.json(), self.ledger.bytes, "Recovered?");
        let found = check::acknowledged(&partition, &self.plan, &mut self.ledger, false, &progress)?;
        drop(progress);
        let entries = partition.len()?;
        // One put may have been under way: done, but not told. Anything beyond was never written.
        let expected = self.ledger.stored..=self.ledger.stored + 1;
        let held = found.wrong.count == 0 && expected.contains(&entries);
        let good = format!(
            "all {} are there (the database has {}); opened in {}, {} replayed",
            count(self.ledger.stored),
            count(entries),
            duration(took),
            plural(replayed, "record")
        );
        partition.flush()?;
        self.summary.counters = self.summary.counters.and_then(Counters::of(&db.metrics(), &partition.metrics()));
        drop(partition);
        db.close()?;
        self.conclude("everything acknowledged survived the crash", held, found.wrong.or(good))
    }

    fn go_on_writing(&mut self) -> Result<()> {
        let left = self.write_time.saturating_sub(self.started.elapsed());
        let outcome = self.run_session(None, left)?;
        self.summary.counters = self.summary.counters.and_then(outcome.counters);
        let files = self.ledger.lines().min(self.plan.files);
        let generated = self.ledger.lines() - files;
        let detail = format!(
            "{} of {} and {}, {} in all",
            count(files),
            plural(self.plan.files, "file"),
            plural(generated, "generated version"),
            bytes(self.ledger.bytes)
        );
        let all = files == self.plan.files || outcome.out_of_time;
        if files < self.plan.files {
            let why = "the time for writing was up before all files were stored; --seconds gives more";
            self.plan.cut_short.push(why.into());
        }
        self.summary.files = files;
        self.summary.generated = generated;
        self.conclude("a new writer went on where the dead one stopped", all, detail)
    }

    fn read_everything(&mut self) -> Result<()> {
        let (db, partition) = options::open(&self.db, self.memtable_bytes)?;
        let progress = Progress::bytes(self.output.json(), self.ledger.bytes, "Reading back");
        let found = check::acknowledged(&partition, &self.plan, &mut self.ledger, true, &progress)?;
        drop(progress);
        let good = format!("{} compared", plural(found.expected.entries, "value"));
        self.conclude("every file reads back byte for byte", found.wrong.count == 0, found.wrong.or(good))?;
        self.summary.changed = (found.changed_count, found.changed);

        let scanned = check::scan_live(&partition)?;
        let same = scanned.digest == found.expected;
        let held = same && scanned.out_of_order.count == 0;
        let good = match same {
            true => format!("{}, {}", plural(scanned.digest.entries, "entry"), bytes(scanned.digest.bytes)),
            false => format!("{} seen, {} expected", count(scanned.digest.entries), count(found.expected.entries)),
        };
        self.conclude("a range scan gives all paths in order", held, scanned.out_of_order.or(good))?;
        self.summary.read(&db, &partition, scanned.digest);
        if self.fills() {
            let levels = self.summary.counters.levels;
            self.conclude("the tree grew to two levels", levels >= 2, format!("{levels} held tables at once"))?;
        }

        let check = snapshot_check::check(&db, &partition, &self.plan, &mut self.ledger, scanned.digest)?;
        self.conclude(check.claim, check.held, check.detail)?;
        drop(partition);
        Ok(db.close()?)
    }

    fn check_files(&mut self) -> Result<()> {
        let report = verify::check_files(&self.db, self.output.json())?;
        let wrong = verify::problems(&report);
        let size = report.files.iter().map(|file| file.bytes).sum();
        let good = format!("{}, {}", plural(report.files.len() as u64, "file"), bytes(size));
        let detail = if wrong.is_empty() { good } else { wrong.join("; ") };
        self.conclude("every byte of the database passes its checks", wrong.is_empty(), detail)
    }

    fn tell_end(mut self, args: &DemoArgs) -> Result<Answer> {
        self.summary.took = self.started.elapsed();
        let held = self.checks.iter().all(|check| check.held);
        if self.output.json() {
            let object = self.summary.json(&self.checks, &self.left_out, &self.plan.cut_short);
            self.output.line(object)?;
            return Ok(Answer::yes_if(held));
        }
        self.output.line("")?;
        self.output.line(self.summary.table(&self.left_out))?;
        for note in self.summary.notes(&self.left_out, &self.plan.cut_short) {
            self.output.line(note)?;
        }
        if let Some(path) = &args.db {
            self.output
                .line(format!("The database is kept; look into it with: azekura levels --db {}", path.display()))?;
        }
        if held {
            self.output.line("All of it held.")?;
        }
        for check in self.checks.iter().filter(|check| !check.held) {
            self.output.line(format!("DID NOT HOLD: {}: {}", check.claim, check.detail))?;
        }
        Ok(Answer::yes_if(held))
    }

    fn run_session(&mut self, kill_after: Option<u64>, time: Duration) -> Result<Outcome> {
        let session = Session {
            plan: &self.plan,
            db: &self.db,
            memtable_bytes: self.memtable_bytes,
            fill: self.fills(),
            time,
            kill_after,
        };
        let progress = Progress::bytes(self.output.json(), self.bytes_to_write(), "Writing").from(self.ledger.bytes);
        session.run(&mut self.ledger, &mut self.left_out, &progress)
    }

    /// Whether generated versions are needed.
    fn fills(&self) -> bool {
        self.plan.bytes < INPUT_BYTES_ENOUGH
    }

    /// As far as it can be told before: two levels need four flushes and one more, or a little less.
    fn bytes_to_write(&self) -> u64 {
        if self.fills() { self.plan.bytes.max(5 * self.memtable_bytes) } else { self.plan.bytes }
    }

    /// Notes a check and shows it at once.
    fn conclude(&mut self, claim: &'static str, held: bool, detail: String) -> Result<()> {
        self.say(format!("{} {claim}\n    {detail}", if held { "✓" } else { "✗" }))?;
        self.checks.push(Check { claim, held, detail });
        Ok(())
    }

    fn say(&mut self, line: String) -> Result<()> {
        if self.output.json() {
            return Ok(());
        }
        self.output.line(line)?;
        self.output.finish()
    }
}

/// The path, if nothing is there yet.
fn fresh_directory(path: &Path) -> Result<PathBuf> {
    let empty = match fs::read_dir(path) {
        Ok(mut names) => names.next().is_none(),
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    };
    if empty {
        return Ok(path.to_path_buf());
    }
    Err(Failure::Input { file: path.to_path_buf(), message: "the demo needs a new or empty directory".into() })
}

fn plan_input(args: &DemoArgs, scratch: &Scratch, db: &Path, until: Instant, json: bool) -> Result<Plan> {
    let given = args.dir.clone().unwrap_or_else(|| PathBuf::from("."));
    let root = fs::canonicalize(&given).map_err(|e| Failure::os("look into the directory", &given, e))?;
    if !root.is_dir() {
        return Err(Failure::Input { file: given, message: "not a directory".into() });
    }
    let without = [scratch.path(), db].into_iter().filter_map(|path| fs::canonicalize(path).ok()).collect();
    let walk = Walk { root: &root, without, without_build: args.dir.is_none(), until };
    walk.plan(&scratch.path().join("files"), json)
}

/// A few hundred small texts, for directories without files.
fn plan_sample(scratch: &Scratch, json: bool) -> Result<Plan> {
    let root = scratch.path().join("sample");
    for n in 0..300u64 {
        let path = root.join(format!("shelf-{:02}/text-{n:03}.txt", n % 12));
        let parent = path.parent().unwrap_or(&root);
        let text = version::sample_text(n, 500 + 131 * n as usize);
        fs::create_dir_all(parent)
            .and_then(|()| fs::write(&path, text))
            .map_err(|e| Failure::os("write a sample", &path, e))?;
    }
    let until = Instant::now() + Duration::from_secs(60);
    Walk { root: &root, without: Vec::new(), without_build: false, until }.plan(&scratch.path().join("files"), json)
}
