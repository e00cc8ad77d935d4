//! What a way to collect shows over time: figures, lines of a table, charts.

use crate::experiment::blobs::gc_run::Way;
use crate::report::draw::chart::{self, Line};
use crate::report::figures::ratio;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;

/// When a sample is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Moment {
    #[default]
    Writing,
    /// Behind a truncation, before a call.
    Truncated,
    /// Behind a call.
    Collected,
    /// At the end, with nothing left in memory.
    Flushed,
    /// Later, when nothing is done any more.
    Rest,
}

/// One look at a database. What was written is since it was opened; bytes of the log are in nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Sample {
    pub(super) moment: Moment,
    pub(super) round: u64,
    pub(super) seconds: f64,
    /// Versions written and removed.
    pub(super) operations: u64,
    /// Of values that were written.
    pub(super) value_bytes: u64,
    /// Of values that are there, as the harness knows.
    pub(super) live_bytes: u64,
    /// In memtables.
    pub(super) memory_bytes: u64,
    /// Of the files that lie in the directory.
    pub(super) blob_disk_bytes: u64,
    pub(super) table_disk_bytes: u64,
    /// Of values in blob files, and of those that tables refer to, as the engine says.
    pub(super) stored_bytes: u64,
    pub(super) referenced_bytes: u64,
    /// Counted where files are written.
    pub(super) blob_bytes_written: u64,
    pub(super) table_bytes_written: u64,
    /// What a scan says behind a call.
    pub(super) reported_space_amp: Option<f64>,
}

impl Sample {
    fn disk_bytes(&self, way: Way) -> u64 {
        // Of values alone, where that can be told.
        if way == Way::Unseparated { self.table_disk_bytes } else { self.blob_disk_bytes }
    }

    /// Bytes on disk and in memory for each live byte; `None` while nothing is live.
    pub(super) fn space_amp(&self, way: Way) -> Option<f64> {
        ratio((self.disk_bytes(way) + self.memory_bytes) as f64, self.live_bytes as f64)
    }

    /// Bytes of values written to files for each one that was written by the user.
    fn write_amp(&self, way: Way, since: &Sample) -> Option<f64> {
        let written = |sample: &Sample| match way {
            Way::Unseparated => sample.table_bytes_written,
            _ => sample.blob_bytes_written,
        };
        let values = self.value_bytes.saturating_sub(since.value_bytes);
        (values > 0).then(|| written(self).saturating_sub(written(since)) as f64 / values as f64)
    }

    fn files_written(&self) -> u64 {
        self.blob_bytes_written + self.table_bytes_written
    }
}

/// What is said about one way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Figures {
    /// Behind the calls where there are any, else at any time; like all but the last, behind the first third.
    pub(super) max_space_amp: Option<f64>,
    /// At any time.
    pub(super) peak_space_amp: Option<f64>,
    pub(super) mean_space_amp: Option<f64>,
    /// The largest that scans said behind calls.
    pub(super) reported_max_space_amp: Option<f64>,
    /// Long after the last write.
    pub(super) rest_space_amp: Option<f64>,
    /// Of values.
    pub(super) write_amp: Option<f64>,
    /// Of blob files and tables together.
    pub(super) files_write_amp: Option<f64>,
    /// Of values, from the first one on.
    pub(super) whole_write_amp: Option<f64>,
}

impl Figures {
    /// The figures of a run of so many rounds.
    pub(super) fn of(way: Way, samples: &[Sample], rounds: u64) -> Figures {
        let steady = |sample: &&Sample| sample.round >= rounds / 3 && sample.moment != Moment::Rest;
        let amps = |wanted: &dyn Fn(&Sample) -> bool| -> Vec<f64> {
            let wanted = samples.iter().filter(steady).filter(|sample| wanted(sample));
            wanted.filter_map(|sample| sample.space_amp(way)).collect()
        };
        let largest = |amps: Vec<f64>| amps.into_iter().reduce(f64::max);
        let all = amps(&|_| true);
        let behind_calls = amps(&|sample| sample.moment == Moment::Collected);
        let called = samples.iter().any(|sample| sample.moment == Moment::Collected);
        let end = samples.iter().rev().find(|sample| sample.moment == Moment::Flushed);
        // The last sample before the steady state.
        let begin = samples.iter().rev().find(|sample| sample.round < rounds / 3).copied().unwrap_or_default();
        let rest = samples.iter().find(|sample| sample.moment == Moment::Rest);
        let values = |end: &Sample| end.value_bytes.saturating_sub(begin.value_bytes) as f64;
        let files = |end: &Sample| end.files_written().saturating_sub(begin.files_written()) as f64;
        Figures {
            max_space_amp: largest(if called { behind_calls } else { all.clone() }),
            peak_space_amp: largest(all.clone()),
            mean_space_amp: (!all.is_empty()).then(|| all.iter().sum::<f64>() / all.len() as f64),
            reported_max_space_amp: largest(
                samples.iter().filter(steady).filter_map(|sample| sample.reported_space_amp).collect(),
            ),
            rest_space_amp: rest.and_then(|sample| sample.space_amp(way)),
            write_amp: end.and_then(|end| end.write_amp(way, &begin)),
            files_write_amp: end.filter(|end| values(end) > 0.0).map(|end| files(end) / values(end)),
            whole_write_amp: end.and_then(|end| end.write_amp(way, &Sample::default())),
        }
    }
}

/// One way and its samples.
pub(super) struct Course {
    pub(super) way: Way,
    pub(super) samples: Vec<Sample>,
}

/// All samples as comma-separated values.
pub(super) fn csv(courses: &[Course]) -> String {
    let mut text = String::from(
        "way,moment,round,seconds,operations,value_bytes,live_bytes,memory_bytes,blob_disk_bytes,table_disk_bytes,\
         stored_bytes,referenced_bytes,blob_bytes_written,table_bytes_written,space_amp,reported_space_amp\n",
    );
    for (way, sample) in courses.iter().flat_map(|course| course.samples.iter().map(|sample| (course.way, sample))) {
        let moment = serde_json::to_value(sample.moment).unwrap_or_default();
        let or_nothing = |number: Option<f64>| number.map_or_else(String::new, |number| format!("{number:.4}"));
        let _ = writeln!(
            text, // writing to a string cannot fail
            "{},{},{},{:.3},{},{},{},{},{},{},{},{},{},{},{},{}",
            way.name(),
            moment.as_str().unwrap_or_default(),
            sample.round,
            sample.seconds,
            sample.operations,
            sample.value_bytes,
            sample.live_bytes,
            sample.memory_bytes,
            sample.blob_disk_bytes,
            sample.table_disk_bytes,
            sample.stored_bytes,
            sample.referenced_bytes,
            sample.blob_bytes_written,
            sample.table_bytes_written,
            or_nothing(sample.space_amp(way)),
            or_nothing(sample.reported_space_amp),
        );
    }
    text
}

/// Charts by the names of their files.
pub(super) fn charts(courses: &[Course]) -> Vec<(&'static str, String)> {
    let lines = |of: &dyn Fn(Way, &Sample) -> Option<f64>| -> Vec<Line> {
        let line = |course: &Course| Line {
            engine: course.way.name(),
            points: course.samples.iter().filter_map(|s| Some((s.seconds, of(course.way, s)?))).collect(),
        };
        courses.iter().map(line).collect()
    };
    let mut space = lines(&|_, sample| Some((sample.blob_disk_bytes + sample.table_disk_bytes) as f64));
    let live = courses.first().map(|course| &course.samples).into_iter().flatten();
    space.push(Line {
        engine: "live values".into(),
        points: live.map(|sample| (sample.seconds, sample.live_bytes as f64)).collect(),
    });
    let written = lines(&|way, sample| sample.write_amp(way, &Sample::default()));
    let space = chart::alone("versions of pages: bytes on disk, without the log", "seconds", &space);
    let written = chart::alone("versions of pages: bytes written per byte of values", "seconds", &written);
    [("space", space), ("write-amp", written)].into_iter().filter_map(|(name, svg)| Some((name, svg?))).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::{Course, Figures, Moment, Sample, charts, csv};
    use crate::experiment::blobs::gc_run::Way;

    /// Rounds of 100 bytes of values each, of which 200 are live; `disk` and `written` for each.
    pub(in crate::experiment::blobs) fn samples(rounds: &[(u64, u64)], moment: Moment) -> Vec<Sample> {
        let mut all = Vec::new();
        for (round, &(disk, written)) in (0u64..).zip(rounds) {
            let sample = Sample {
                round,
                seconds: round as f64,
                value_bytes: 100 * (round + 1),
                live_bytes: 200,
                blob_disk_bytes: disk + 100,
                blob_bytes_written: written,
                table_bytes_written: 10 * (round + 1),
                ..Sample::default()
            };
            all.push(sample);
            let reported_space_amp = Some(disk as f64 / 200.0);
            all.push(Sample { moment, blob_disk_bytes: disk, reported_space_amp, ..sample });
        }
        let last = *all.last().unwrap();
        all.push(Sample { moment: Moment::Flushed, ..last });
        all.push(Sample { moment: Moment::Rest, blob_disk_bytes: 220, ..last });
        all
    }

    #[test]
    fn figures_are_those_of_the_steady_state() {
        let rounds = [(900, 100), (300, 200), (320, 400), (360, 600), (280, 800), (300, 1000)];
        let called = Figures::of(Way::Target(1.5), &samples(&rounds, Moment::Collected), 6);
        assert_eq!(called.max_space_amp, Some(1.8), "behind calls, and not in the first third");
        assert_eq!(called.reported_max_space_amp, Some(1.8));
        assert_eq!(called.peak_space_amp, Some(2.3));
        assert_eq!(called.rest_space_amp, Some(1.1));
        assert_eq!((called.write_amp, called.whole_write_amp), (Some(2.0), Some(1000.0 / 600.0)));
        assert_eq!(called.files_write_amp, Some(2.1));
        let automatic = Figures::of(Way::Automatic(1.5), &samples(&rounds, Moment::Truncated), 6);
        assert_eq!(automatic.max_space_amp, Some(2.3), "at any time");
        assert_eq!(Figures::of(Way::Never, &[], 6), Figures::default());
    }

    #[test]
    fn what_is_in_memory_counts_as_much_as_what_is_on_disk() {
        let (live_bytes, memory_bytes) = (200, 100);
        let sample =
            Sample { live_bytes, memory_bytes, blob_disk_bytes: 300, table_disk_bytes: 400, ..Sample::default() };
        assert_eq!((sample.space_amp(Way::Never), sample.space_amp(Way::Unseparated)), (Some(2.0), Some(2.5)));
        assert_eq!(Sample::default().space_amp(Way::Never), None);
    }

    #[test]
    fn every_sample_is_a_line_and_every_way_is_drawn() {
        let rounds = [(300, 100), (300, 200)];
        let ways = [Way::Never, Way::Target(2.0), Way::Automatic(1.5), Way::Unseparated];
        let courses = ways.map(|way| Course { way, samples: samples(&rounds, Moment::Collected) });
        let table = csv(&courses);
        let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split(',').collect()).collect();
        assert_eq!(lines.len(), 1 + 4 * 6);
        assert!(lines.iter().all(|line| line.len() == lines[0].len()));
        assert_eq!(lines[2][..4], ["no gc", "collected", "0", "0.000"]);
        assert_eq!(lines[2][14..], ["1.5000", "1.5000"]);
        let drawn = charts(&courses);
        assert_eq!(drawn.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["space", "write-amp"]);
        for (name, svg) in &drawn {
            let drawing = roxmltree::Document::parse(svg).unwrap();
            let names = ways.map(Way::name);
            assert!(names.iter().all(|way| svg.contains(&format!(">{way}<"))), "{name}: {svg}");
            assert!(drawing.descendants().any(|node| node.has_tag_name("polyline")), "{name}");
        }
        assert!(charts(&[]).is_empty());
    }
}
