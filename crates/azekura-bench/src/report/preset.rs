//! What `report quick` and `report full` run: tables, not code. Their arithmetic keeps them within their time.

use crate::failure::Result;

/// A whole report.
#[derive(Debug)]
pub(crate) struct Preset {
    /// Its name on the command line.
    pub(crate) name: &'static str,
    /// Rounds of every measurement.
    pub(crate) rounds: u32,
    /// Seconds it is planned to take, however many engines there are.
    pub(crate) planned_s: f64,
    /// Seconds it never goes beyond.
    pub(crate) limit_s: f64,
    /// Seconds a single child process may take.
    pub(crate) child_s: u32,
    /// Seconds that a measurement takes beside its operations: opening, warming up, settling, reading back.
    pub(crate) overhead_s: f64,
    /// No measurement is longer than this, even if there is time.
    pub(crate) longest_s: f64,
    /// Seconds of each measurement of the device.
    pub(crate) device_s: f64,
    /// Arguments of every entry.
    pub(crate) arguments: &'static str,
    pub(crate) entries: &'static [Entry],
}

/// Workloads on one data set with one set of options.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) title: &'static str,
    pub(crate) about: &'static str,
    /// Workloads, as `--workload` takes them.
    pub(crate) workloads: &'static str,
    /// Numbers of threads, as `--threads` takes them.
    pub(crate) threads: &'static str,
    /// Further arguments of `run`.
    pub(crate) arguments: &'static str,
    /// Seconds one engine takes to load what is not loaded yet.
    pub(crate) load_s: f64,
    /// Whether the loaded databases are of no use to the next entry.
    pub(crate) last_of_data: bool,
    /// Field, unit, and whether less is better.
    pub(crate) goal: (&'static str, &'static str, bool),
}

const RATE: (&str, &str, bool) = ("ops_per_s", "ops/s", false);

/// What stands the same in both presets, so that they differ in sizes only.
const SYNCED: &str = "Random puts, each synced to the device before it returns. Threads share one database, so \
    that one sync can serve several commits; how many it served is told where the engine tells \
    it.";
const WRITES: &str = "Random puts into an empty database, and new values for random records of a loaded one. \
    Puts are not synced; what that promises differs by engine and is told in the README of the \
    bench.";
const BULK: &str = "Ascending keys in batches of 1,000 into an empty database; the sync at the end counts.";
const CACHED: &str = "Everything fits into the cache, the database is at rest, every value is checked.";
const THREADS: &str = "Random gets from the cache by threads that share one database.";
const BESIDE: &str = "Random gets while one more thread overwrites records at a fixed rate. Operations are the \
    reads.";
const BEYOND: &str = "Random gets with a cache much smaller than the data: what misses it comes from the page \
    cache.";
const COLD: &str = "The same, with the page cache emptied of the database before the reads and once a second, so \
    that most reads reach the device. Pages that a process has mapped stay: LMDB keeps what it has touched.";
const QUEUE: &str = "Producers append, a consumer scans the first records and deletes them; the depth stays the \
    same.";
const PARTITIONS: &str = "Random puts and gets over 64 partitions of one database.";
const BLOBS: &str = "Values of 4 KiB to 1 MiB, as many small as large. Values from 1 KiB are kept apart from \
    the tree by engines that can.";
const KILLED: &str = "A process is killed right behind its last write, nothing synced; compared is the time to \
    open. Every record is looked for. An engine that promises less for such writes may have \
    lost the last ones.";
const OPENED: &str = "The time to open a database that was closed cleanly.";
const YCSB: &str = "Half reads and half updates; 95 % reads; short scans with inserts; all zipfian.";

const QUICK: Preset = Preset {
    name: "quick",
    rounds: 3,
    planned_s: 250.0,
    limit_s: 300.0,
    child_s: 15,
    overhead_s: 0.35,
    longest_s: 2.0,
    device_s: 0.2,
    arguments: "--n 200000 --memtable-size 16M --warm-ops 20000",
    entries: &[
        entry("Writes", WRITES, "fillrandom", "1", "", 0.0, false, RATE),
        entry("Synced writes", SYNCED, "fillsync", "1,16", "", 0.0, false, RATE),
        entry("Bulk load", BULK, "bulkload", "1", "", 0.0, false, RATE),
        entry("Reads from the cache", CACHED, "readmissing,readseq,scan10", "1", "", 1.0, false, RATE),
        entry("Threads", THREADS, "readrandom", "1,2", "", 0.0, false, RATE),
        entry("Reads beside writes", BESIDE, "readwhilewriting", "1", "", 0.0, false, RATE),
        entry("Opening", OPENED, "open", "1", "", 0.0, false, ("open_ms", "ms", true)),
        entry("Larger than the cache", BEYOND, "readzipf", "1", "--cache-size 4M", 0.0, true, RATE),
        entry("Queue", QUEUE, "queue", "1", "", 0.0, true, RATE),
        entry("Partitions", PARTITIONS, "partitions64", "1", "--n 20000", 0.0, true, RATE),
        entry("Blobs", BLOBS, "blobread,bloboverwrite", "1", BLOBS_SMALL, 1.0, true, RATE),
        entry("After a kill", KILLED, "recovery", "1", "--n 50000", 0.0, true, ("open_ms", "ms", true)),
    ],
};

/// The mean of values from 4 KiB to 1 MiB, spread evenly by their logarithm, is 184 KiB: about 100 MiB.
const BLOBS_SMALL: &str = "--n 560 --value-size 4K-1M --separate-from 1K --cache-size 32M --warm-ops 100";
/// About 1 GiB.
const BLOBS_LARGE: &str = "--n 5600 --value-size 4K-1M --separate-from 1K --cache-size 256M --warm-ops 500";

const SCANS: &str = "scan10,scan100,scan10-reverse,scan100-reverse";

const FULL: Preset = Preset {
    name: "full",
    rounds: 3,
    planned_s: 2400.0,
    limit_s: 3480.0,
    child_s: 180,
    overhead_s: 1.2,
    longest_s: 10.0,
    device_s: 0.5,
    arguments: "--n 2000000 --warm-ops 300000",
    entries: &[
        entry("Writes", WRITES, "fillrandom,overwrite", "1", "", 8.0, false, RATE),
        entry("Synced writes", SYNCED, "fillsync", "1,4,16,64", "", 0.0, false, RATE),
        entry("Bulk load", BULK, "bulkload", "1", "", 0.0, false, RATE),
        entry("Reads from the cache", CACHED, "readmissing,readzipf,readseq,readreverse", "1", "", 0.0, false, RATE),
        entry("Scans", CACHED, SCANS, "1", "--warm-ops 20000", 0.0, false, RATE),
        entry("Threads", THREADS, "readrandom", "1,2,4", "", 0.0, false, RATE),
        entry("Reads beside writes", BESIDE, "readwhilewriting", "1", "", 0.0, false, RATE),
        entry("YCSB", YCSB, "ycsb-a,ycsb-b,ycsb-e", "1", "", 0.0, false, RATE),
        entry("Opening", OPENED, "open", "1", "", 0.0, false, ("open_ms", "ms", true)),
        entry("Larger than the cache", BEYOND, "readrandom,readzipf", "1", "--cache-size 16M", 0.0, false, RATE),
        entry(
            "From the device",
            COLD,
            "readrandom,readzipf",
            "1",
            "--cache-size 16M --warm-ops 1000 --cold",
            0.0,
            true,
            RATE,
        ),
        entry("Queue", QUEUE, "queue", "1", "", 0.0, true, RATE),
        entry("Partitions", PARTITIONS, "partitions64", "1", "--n 500000", 0.0, true, RATE),
        entry("Blobs", BLOBS, "blobload,blobread,bloboverwrite", "1", BLOBS_LARGE, 12.0, true, RATE),
        entry("After a kill", KILLED, "recovery", "1", "--n 200000", 0.0, true, ("open_ms", "ms", true)),
    ],
};

const PRESETS: [&Preset; 2] = [&QUICK, &FULL];

#[allow(clippy::too_many_arguments)] // a row of a table
const fn entry(
    title: &'static str,
    about: &'static str,
    workloads: &'static str,
    threads: &'static str,
    arguments: &'static str,
    load_s: f64,
    last_of_data: bool,
    goal: (&'static str, &'static str, bool),
) -> Entry {
    Entry { title, about, workloads, threads, arguments, load_s, last_of_data, goal }
}

/// The preset of that name.
pub(crate) fn named(name: &str) -> Result<&'static Preset> {
    let known: Vec<&str> = PRESETS.iter().map(|preset| preset.name).collect();
    let found = PRESETS.iter().find(|preset| preset.name == name);
    Ok(found.ok_or_else(|| format!("no preset is called `{name}`; there are {}", known.join(", ")))?)
}

impl Entry {
    /// Cases: workloads times numbers of threads.
    pub(crate) fn cases(&self) -> u32 {
        (self.workloads.split(',').count() * self.threads.split(',').count()) as u32
    }
}

impl Preset {
    /// Measurements of one entry.
    pub(crate) fn measurements(&self, entry: &Entry, engines: usize) -> u32 {
        entry.cases() * self.rounds * engines as u32
    }

    /// Seconds of each measurement, so that all of them end in the time planned.
    pub(crate) fn seconds(&self, engines: usize) -> f64 {
        let all: u32 = self.entries.iter().map(|entry| self.measurements(entry, engines)).sum();
        let left = self.planned_s - self.device_time() - self.loading(engines) - f64::from(all) * self.overhead_s;
        let each = left / f64::from(all.max(1));
        (each.clamp(0.2, self.longest_s) * 100.0).floor() / 100.0
    }

    fn loading(&self, engines: usize) -> f64 {
        self.entries.iter().map(|entry| entry.load_s).sum::<f64>() * engines as f64
    }

    /// Seconds that the limits of the device are measured for, before and behind.
    fn device_time(&self) -> f64 {
        2.0 * (4.0 * self.device_s + 1.0)
    }

    /// Seconds one entry should take.
    pub(crate) fn planned(&self, entry: &Entry, engines: usize) -> f64 {
        let each = self.seconds(engines) + self.overhead_s;
        f64::from(self.measurements(entry, engines)) * each + entry.load_s * engines as f64
    }

    /// Seconds the whole should take.
    pub(crate) fn total(&self, engines: usize) -> f64 {
        self.entries.iter().map(|entry| self.planned(entry, engines)).sum::<f64>() + self.device_time()
    }

    /// Seconds behind the beginning from which on no measurement of an entry is begun, for each entry. They are shares
    /// of the limit, so that a slow entry costs its own rounds first; and behind the last of them one child may
    /// still be loading and measuring, and the device be measured, within the limit.
    pub(crate) fn deadlines(&self, engines: usize) -> Vec<f64> {
        let reserve = 2.0 * f64::from(self.child_s) + self.device_time();
        let stretch = (self.limit_s - reserve) / self.total(engines);
        let mut sum = self.device_time() / 2.0;
        self.entries
            .iter()
            .map(|entry| {
                sum += self.planned(entry, engines);
                sum * stretch
            })
            .collect()
    }

    /// The arguments of `run` for one entry.
    pub(crate) fn command(&self, entry: &Entry, engines: &[String]) -> Vec<String> {
        let seconds = self.seconds(engines.len()).to_string();
        let own = [
            "run",
            "--workload",
            entry.workloads,
            "--engine",
            &engines.join(","),
            "--threads",
            entry.threads,
            "--rounds",
            &self.rounds.to_string(),
            "--seconds",
            &seconds,
            "--limit",
            &self.child_s.to_string(),
        ]
        .map(str::to_owned);
        // The entry's own arguments come last and win over those of the preset.
        own.into_iter().chain(self.joined(entry)).collect()
    }

    /// The preset's arguments but for those that the entry has too, then the entry's.
    fn joined(&self, entry: &Entry) -> Vec<String> {
        let words: Vec<&str> = self.arguments.split_whitespace().collect();
        let own: Vec<&str> = entry.arguments.split_whitespace().collect();
        let pairs = words.chunks(2).filter(|pair| !own.contains(&pair[0]));
        pairs.flatten().chain(&own).map(|word| (*word).to_owned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{FULL, PRESETS, Preset, QUICK, named};
    use crate::cli::{Cli, Command};
    use crate::task::rounds::Comparison;
    use clap::Parser;

    fn comparisons(preset: &Preset) -> Vec<Comparison> {
        let parse = |entry| {
            let words = preset.command(entry, &["azekura".to_owned()]);
            match Cli::try_parse_from([vec!["azekura-bench".to_owned()], words].concat()).map(|cli| cli.command) {
                Ok(Command::Run(run)) => run.comparison().unwrap(),
                other => panic!("{}: {other:?}", entry.title),
            }
        };
        preset.entries.iter().map(parse).collect()
    }

    #[test]
    fn presets_stay_within_their_time() {
        for (preset, most) in [(&QUICK, 300.0), (&FULL, 3600.0)] {
            for engines in 1..=8 {
                let total = preset.total(engines);
                assert!(total <= preset.planned_s + 1.0, "{} with {engines}: {total}", preset.name);
                let deadlines = preset.deadlines(engines);
                let last = deadlines.last().unwrap() + 2.0 * f64::from(preset.child_s) + preset.device_time() / 2.0;
                assert!(
                    last <= preset.limit_s + 1.0 && preset.limit_s <= most,
                    "{} with {engines}: {last}",
                    preset.name
                );
                assert!(deadlines.is_sorted());
            }
        }
        assert!(QUICK.seconds(7) >= 0.25, "{}", QUICK.seconds(7));
        assert!(FULL.seconds(7) >= 1.5, "{}", FULL.seconds(7));
        assert!((2000.0..=2700.0).contains(&FULL.total(7)), "{}", FULL.total(7));
    }

    #[test]
    fn presets_have_three_rounds_and_every_family() {
        for preset in PRESETS {
            assert!(preset.rounds >= 3);
            let all: Vec<&str> = preset.entries.iter().flat_map(|entry| entry.workloads.split(',')).collect();
            for workload in [
                "fillrandom",
                "fillsync",
                "bulkload",
                "readrandom",
                "readmissing",
                "readseq",
                "scan10",
                "readzipf",
                "readwhilewriting",
                "queue",
                "partitions64",
                "blobread",
                "bloboverwrite",
                "recovery",
                "open",
            ] {
                assert!(all.contains(&workload), "{workload} is missing from {}", preset.name);
            }
            assert!(preset.entries.last().unwrap().last_of_data);
        }
    }

    #[test]
    fn every_entry_is_a_command_that_parses() {
        for preset in PRESETS {
            for (entry, comparison) in preset.entries.iter().zip(comparisons(preset)) {
                assert_eq!(comparison.rounds, preset.rounds, "{}", entry.title);
                assert_eq!((comparison.workloads.len() * comparison.threads.len()) as u32, entry.cases());
            }
        }
        let partitions = QUICK.entries.iter().position(|entry| entry.workloads == "partitions64").unwrap();
        assert_eq!(comparisons(&QUICK)[partitions].plan.shape.n, 20_000, "an entry's own arguments win");
    }

    #[test]
    fn names_are_known_or_listed() {
        assert_eq!(named("quick").unwrap().name, "quick");
        assert!(named("slow").unwrap_err().to_string().contains("quick, full"));
    }
}
