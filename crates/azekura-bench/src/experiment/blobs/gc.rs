//! `blob-gc`: what it costs to keep the space of stale values small, in a history of versions of HTML pages.
//!
//! In each round as many random pages are written anew as there are pages, each version under a key of its own; then
//! writing stops, and of pages with more than five versions the oldest are removed. That goes through without
//! collection, with a call towards a target behind each truncation, with the engine doing it by itself, and with values
//! in the tree. Nothing is compressed, so that bytes are those of the user; the log is in no figure.
//!
//! - `…_write_amp`: bytes written to blob files (without separation: to tables) for each byte of values written.
//! - `…_max_space_amp`: bytes of blob files in the directory (without separation: of tables), and of memtables, for
//!   each byte of live values, the largest behind a call, where memtables are empty; with automatic collection at any
//!   time, as for `…_peak_space_amp`.
//!
//! Both are of the steady state, which begins behind the first third of the rounds.

use crate::experiment::blobs::gc_run::{Task, Way, run};
use crate::experiment::blobs::pages::{Wanted, pack};
use crate::experiment::blobs::series::{Course, Figures, Sample, charts, csv};
use crate::experiment::experiment::{Context, Experiment};
use crate::failure::Result;
use crate::machine::disk;
use crate::report::figures::ratio;
use serde_json::{Map, Value, json};

/// Smaller pages would stay in the tree.
const LEAST_BYTES: u64 = 1 << 10;
const MEANING: [(&str, &str); 3] = [
    (
        "write_amp_is",
        "bytes written to blob files, of unseparated to tables, per byte of values, behind the first third",
    ),
    (
        "max_space_amp_is",
        "bytes of blob files on disk, of unseparated of tables, and of memtables, per live byte of values, the largest \
         behind the first third: right behind each call, or at any time where there are none",
    ),
    ("unseparated_ratio_is", "bytes written to blob files and tables without separation per those at a target of 1.5"),
];

/// See the module.
pub(crate) struct BlobGc;

/// The ways, and what their fields begin with.
const WAYS: [(Way, &str); 7] = [
    (Way::Never, "no_gc"),
    (Way::Target(1.5), "target_1_5"),
    (Way::Target(2.0), "target_2_0"),
    (Way::Target(3.0), "target_3_0"),
    (Way::Automatic(1.5), "automatic"),
    (Way::Automatic(2.0), "automatic_2_0"),
    (Way::Unseparated, "unseparated"),
];

/// What is wanted: a field, a bound, and whether it must not be exceeded.
const TARGETS: [(&str, f64, bool); 5] = [
    ("target_1_5_write_amp", 2.7, true),
    ("target_1_5_max_space_amp", 1.65, true),
    ("target_2_0_write_amp", 2.0, true),
    ("target_2_0_max_space_amp", 2.2, true),
    ("unseparated_ratio", 2.0, false),
];

impl Experiment for BlobGc {
    fn name(&self) -> &'static str {
        "blob-gc"
    }

    fn about(&self) -> &'static str {
        "versions of HTML pages that come and go: space and writing by how stale values are collected"
    }

    fn run(&self, context: &Context<'_>) -> Result<Map<String, Value>> {
        let (total_bytes, rounds) = context.size((8 << 20, 30), (100 << 20, 40));
        let (memtable_bytes, blob_file_bytes) = context.size((3 << 20, 1 << 20), (32 << 20, 16 << 20));
        let pages = context.fresh("pages")?;
        let packed = pack(context.pages, Wanted { least_bytes: LEAST_BYTES, total_bytes, pages: u64::MAX }, &pages)?;
        let mut answer = Map::new();
        packed.put(&mut answer);
        for (name, value) in
            [("rounds_of_writes", rounds), ("memtable_bytes", memtable_bytes), ("blob_file_bytes", blob_file_bytes)]
        {
            answer.insert(name.into(), json!(value));
        }
        let (mut courses, mut runs) = (Vec::new(), Map::new());
        for (way, prefix) in WAYS {
            let task =
                Task { way, dir: context.fresh("db")?, pages: pages.clone(), rounds, memtable_bytes, blob_file_bytes };
            let mut told = context.child(&json!(task)).map_err(|failure| format!("{}: {failure}", way.name()))?;
            if !context.scratch.keeps() {
                disk::remove(&task.dir)?;
            }
            let samples: Vec<Sample> = serde_json::from_value(told.remove("samples").unwrap_or_default())?;
            let figures = Figures::of(way, &samples, rounds);
            told.insert("figures".into(), json!(figures));
            eprintln!("{}: {}", way.name(), Value::Object(told.clone()));
            runs.insert(prefix.into(), Value::Object(told));
            courses.push(Course { way, samples });
        }
        put(&mut answer, &courses, rounds);
        answer.insert("runs".into(), Value::Object(runs));
        context.write("blob-gc.csv", &csv(&courses))?;
        for (name, svg) in charts(&courses) {
            context.write(&format!("blob-gc-{name}.svg"), &svg)?;
        }
        Ok(answer)
    }

    fn variant(&self, task: &Value) -> Result<Map<String, Value>> {
        match run(serde_json::from_value(task.clone())?)? {
            Value::Object(answer) => Ok(answer),
            _ => Err("a run answers with an object".into()),
        }
    }
}

fn put(answer: &mut Map<String, Value>, courses: &[Course], rounds: u64) {
    for (name, words) in MEANING {
        answer.insert(name.into(), json!(words));
    }
    let mut files_written = Map::new();
    for (course, (_, prefix)) in courses.iter().zip(WAYS) {
        let figures = Figures::of(course.way, &course.samples, rounds);
        for (field, figure) in [
            ("max_space_amp", figures.max_space_amp),
            ("write_amp", figures.write_amp),
            ("peak_space_amp", figures.peak_space_amp),
            ("mean_space_amp", figures.mean_space_amp),
        ] {
            answer.insert(format!("{prefix}_{field}"), json!(figure));
        }
        if matches!(course.way, Way::Automatic(_)) {
            answer.insert(format!("{prefix}_rest_space_amp"), json!(figures.rest_space_amp));
        }
        files_written.insert(prefix.into(), json!(figures.files_write_amp));
    }
    let end = courses.first().and_then(|course| Some(course.samples.last()?.space_amp(course.way)));
    answer.insert("no_gc_space_amp".into(), json!(end.flatten()));
    let written = |prefix: &str| files_written.get(prefix).and_then(Value::as_f64);
    let more = written("unseparated").zip(written("target_1_5")).and_then(|(tree, apart)| ratio(tree, apart));
    answer.insert("unseparated_ratio".into(), json!(more));
    answer.insert("files_write_amp".into(), Value::Object(files_written));
    let mut targets = Map::new();
    for (field, bound, most) in TARGETS {
        let is = answer.get(field).and_then(Value::as_f64);
        let met = is.map(|is| if most { is <= bound } else { is >= bound });
        let word = if most { "at_most" } else { "at_least" };
        targets.insert(field.into(), json!({word: bound, "is": is, "met": met}));
    }
    answer.insert("targets".into(), Value::Object(targets));
}

#[cfg(test)]
mod tests {
    use super::{TARGETS, WAYS, put};
    use crate::experiment::blobs::gc_run::Way;
    use crate::experiment::blobs::series::tests::samples;
    use crate::experiment::blobs::series::{Course, Moment, Sample};
    use serde_json::{Map, Value, json};

    /// Three rounds, with so many bytes on disk and written behind each.
    fn courses() -> Vec<Course> {
        let course = |(way, _): (Way, &str)| {
            let (moment, rounds) = match way {
                Way::Target(_) => (Moment::Collected, [(280, 100), (300, 250), (290, 400)]),
                _ => (Moment::Truncated, [(280, 100), (400, 200), (500, 300)]),
            };
            let in_tree = |sample: Sample| Sample {
                table_disk_bytes: sample.blob_disk_bytes,
                table_bytes_written: 3 * sample.blob_bytes_written,
                blob_disk_bytes: 0,
                blob_bytes_written: 0,
                ..sample
            };
            let samples = samples(&rounds, moment);
            let samples = if way == Way::Unseparated { samples.into_iter().map(in_tree).collect() } else { samples };
            Course { way, samples }
        };
        WAYS.into_iter().map(course).collect()
    }

    #[test]
    fn every_way_has_its_fields_and_targets_are_judged() {
        let mut answer = Map::new();
        put(&mut answer, &courses(), 3);
        for (field, expected) in [
            ("target_1_5_max_space_amp", json!(1.5)),
            ("target_1_5_peak_space_amp", json!(2.0)),
            ("target_1_5_write_amp", json!(1.5)),
            ("automatic_max_space_amp", json!(3.0)),
            ("automatic_rest_space_amp", json!(1.1)),
            ("automatic_write_amp", json!(1.0)),
            ("unseparated_write_amp", json!(3.0)),
            ("unseparated_ratio", json!(3.0 / 1.6)),
            ("no_gc_write_amp", json!(1.0)),
            ("no_gc_space_amp", json!(1.1)),
        ] {
            assert_eq!(answer.get(field), Some(&expected), "{field}");
        }
        assert!(WAYS.iter().all(|(_, prefix)| answer[&format!("{prefix}_mean_space_amp")].is_number()));
        let targets = answer["targets"].as_object().unwrap();
        assert_eq!(targets.len(), TARGETS.len());
        assert_eq!(targets["target_1_5_write_amp"], json!({"at_most": 2.7, "is": 1.5, "met": true}));
        assert_eq!(targets["unseparated_ratio"]["met"], false);
    }

    #[test]
    fn what_did_not_run_is_not_judged() {
        let mut answer = Map::new();
        put(&mut answer, &[], 3);
        assert_eq!(answer["unseparated_ratio"], Value::Null);
        assert!(answer["targets"].as_object().unwrap().values().all(|target| target["met"].is_null()));
    }
}
