//! What `report quick` and `report full` run, read from `presets.json`, and how their time is divided.

use crate::error::Result;
use crate::report::compare::Goal;
use serde::Deserialize;

/// A whole report.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Preset {
    pub(crate) name: String,
    pub(crate) rounds: u32,
    /// Seconds that it is planned to take, for any number of engines.
    pub(crate) planned_s: f64,
    /// Seconds that it never exceeds.
    pub(crate) limit_s: f64,
    /// Seconds that a child process may take.
    pub(crate) child_s: u32,
    /// Seconds that a measurement takes beside its operations: opening, warming up, settling, reading back.
    overhead_s: f64,
    /// Longest measurement.
    longest_s: f64,
    /// Seconds of each measurement of the device.
    pub(crate) device_s: f64,
    /// Arguments of every entry.
    arguments: String,
    pub(crate) entries: Vec<PresetEntry>,
}

/// Workloads on one data set with one set of options.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PresetEntry {
    pub(crate) title: String,
    pub(crate) about: String,
    /// Workloads, as `--workload` takes them.
    pub(crate) workloads: String,
    /// Numbers of threads, as `--threads` takes them.
    threads: String,
    /// Further arguments of `run`.
    arguments: String,
    /// Seconds that one engine takes to load what is not loaded yet.
    load_s: f64,
    /// Whether the next entry uses other databases.
    pub(crate) last_of_data: bool,
    pub(crate) goal: Goal,
}

/// The presets.
pub(crate) fn all() -> Result<Vec<Preset>> {
    Ok(serde_json::from_str(include_str!("presets.json"))?)
}

impl Preset {
    /// Measurements of one entry.
    pub(crate) fn measurements(&self, entry: &PresetEntry, engines: usize) -> u32 {
        let cases = entry.workloads.split(',').count() * entry.threads.split(',').count();
        (cases * engines) as u32 * self.rounds
    }

    /// Seconds of each measurement, so that all of them fit the planned time.
    pub(crate) fn seconds(&self, engines: usize) -> f64 {
        let all: u32 = self.entries.iter().map(|entry| self.measurements(entry, engines)).sum();
        let loading: f64 = self.entries.iter().map(|entry| entry.load_s * engines as f64).sum();
        let left = self.planned_s - self.device_time() - loading - f64::from(all) * self.overhead_s;
        ((left / f64::from(all.max(1))).clamp(0.2, self.longest_s) * 100.0).floor() / 100.0
    }

    /// Seconds in which the device is measured, before and after.
    fn device_time(&self) -> f64 {
        2.0 * (4.0 * self.device_s + 1.0)
    }

    fn planned(&self, entry: &PresetEntry, engines: usize) -> f64 {
        let each = self.seconds(engines) + self.overhead_s;
        f64::from(self.measurements(entry, engines)) * each + entry.load_s * engines as f64
    }

    /// Seconds that the whole should take.
    pub(crate) fn total(&self, engines: usize) -> f64 {
        self.entries.iter().map(|entry| self.planned(entry, engines)).sum::<f64>() + self.device_time()
    }

    /// For each entry the seconds after the start from which on none of its measurements begins. They are shares of the
    /// limit, so that a slow entry loses its own rounds first; they leave time for one child that loads and measures.
    pub(crate) fn deadlines(&self, engines: usize) -> Vec<f64> {
        let stretch = (self.limit_s - 2.0 * f64::from(self.child_s) - self.device_time()) / self.total(engines);
        let mut sum = self.device_time() / 2.0;
        let until = self.entries.iter().map(|entry| {
            sum += self.planned(entry, engines);
            sum * stretch
        });
        until.collect()
    }

    /// The arguments of `run` for one entry. Those of the entry replace those of the preset.
    pub(crate) fn command(&self, entry: &PresetEntry, engines: &[String]) -> Vec<String> {
        let (seconds, engines) = (self.seconds(engines.len()), engines.join(","));
        let PresetEntry { workloads, threads, arguments, .. } = entry;
        let Preset { rounds, child_s, .. } = self;
        let own: Vec<&str> = arguments.split_whitespace().collect();
        let words: Vec<&str> = self.arguments.split_whitespace().collect();
        let kept = words.chunks(2).filter(|pair| !own.contains(&pair[0])).flatten().chain(&own);
        let head = format!(
            "run --workload {workloads} --engine {engines} --threads {threads} --rounds {rounds} --seconds {seconds} \
             --limit {child_s}"
        );
        head.split_whitespace().chain(kept.copied()).map(str::to_owned).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::all;

    #[test]
    fn presets_fit_their_time() {
        for preset in all().unwrap() {
            for engines in 1..=8 {
                let total = preset.total(engines);
                assert!(total <= preset.planned_s + 1.0, "{} with {engines}: {total}", preset.name);
                let deadlines = preset.deadlines(engines);
                let last = deadlines.last().unwrap() + 2.0 * f64::from(preset.child_s) + preset.device_time() / 2.0;
                assert!(last <= preset.limit_s + 1.0 && deadlines.is_sorted(), "{} with {engines}", preset.name);
            }
            assert!(preset.seconds(7) >= 0.25, "{}", preset.seconds(7));
            assert!(preset.rounds >= 3 && preset.entries.last().unwrap().last_of_data);
        }
    }

    #[test]
    fn presets_have_every_family_of_workloads() {
        let families = "fillrandom fillsync bulkload readrandom readmissing readseq scan10 readzipf readwhilewriting \
            queue partitions64 blobread bloboverwrite recovery open";
        for preset in all().unwrap() {
            let all: Vec<&str> = preset.entries.iter().flat_map(|entry| entry.workloads.split(',')).collect();
            for workload in families.split_whitespace() {
                assert!(all.contains(&workload), "{workload} is missing from {}", preset.name);
            }
        }
    }
}
