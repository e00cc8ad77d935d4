//! From the measurements of a document to what is shown: one case per workload and number of threads, one standing per
//! engine, one verdict. Reads fields by name and takes nothing for granted: a missing figure stays missing.

use crate::engine::registry::{self, OURS};
use crate::report::document::{Document, Goal, Section};
use crate::report::summary::median;
use serde_json::Value;
use std::borrow::Cow;

/// One workload with one number of threads.
#[derive(Clone, Debug)]
pub(crate) struct Case<'a> {
    pub(crate) section: &'a Section,
    pub(crate) workload: String,
    pub(crate) threads: u64,
    /// One for each engine of the document, in its order.
    pub(crate) standings: Vec<Standing<'a>>,
}

/// One engine in one case.
#[derive(Clone, Debug)]
pub(crate) struct Standing<'a> {
    pub(crate) engine: String,
    /// Rounds with figures.
    rounds: Vec<&'a Value>,
    /// What went wrong, in words; also where some rounds have figures.
    pub(crate) trouble: Option<String>,
    /// The same in a word or two.
    brief: &'static str,
}

/// How azekura stands to its best peer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Verdict {
    /// The peer with the best median.
    pub(crate) peer: String,
    /// Ratio of medians, above 1 if azekura is better, whichever way the figure goes.
    pub(crate) ratio: f64,
    /// Least and largest ratio within one round; `None` if no round has both.
    pub(crate) range: Option<(f64, f64)>,
}

impl Verdict {
    pub(crate) fn wins(&self) -> bool {
        self.ratio >= 1.0
    }

    /// Whether some rounds say otherwise.
    pub(crate) fn disputed(&self) -> bool {
        self.range.is_some_and(|(low, high)| low < 1.0 && high > 1.0)
    }
}

/// `top / bottom`, if that is a number above 0.
pub(crate) fn ratio(top: f64, bottom: f64) -> Option<f64> {
    let ratio = top / bottom;
    (ratio.is_finite() && ratio > 0.0).then_some(ratio)
}

/// The cases of a section, in the order their measurements first appear.
pub(crate) fn cases<'a>(document: &'a Document, section: &'a Section) -> Vec<Case<'a>> {
    let mut kinds: Vec<(String, u64)> = Vec::new();
    for one in &section.measurements {
        let kind = kind(one);
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    // By workload first, so that its counts of threads stand together.
    let mut workloads: Vec<String> = Vec::new();
    kinds.iter().for_each(|(workload, _)| {
        if !workloads.contains(workload) {
            workloads.push(workload.clone());
        }
    });
    kinds.sort_by_key(|(workload, threads)| (workloads.iter().position(|one| one == workload), *threads));
    kinds.into_iter().map(|(workload, threads)| case(document, section, workload, threads)).collect()
}

fn kind(measurement: &Value) -> (String, u64) {
    let workload = measurement["workload"].as_str().unwrap_or("unnamed").to_owned();
    (workload, measurement["threads"].as_u64().unwrap_or(1))
}

fn case<'a>(document: &'a Document, section: &'a Section, workload: String, threads: u64) -> Case<'a> {
    let rows: Vec<&Value> =
        section.measurements.iter().filter(|one| kind(one) == (workload.clone(), threads)).collect();
    let standing = |engine: &crate::report::document::EngineNote| {
        let own: Vec<&Value> = rows.iter().copied().filter(|one| one["engine"] == engine.name.as_str()).collect();
        let (bad, rounds): (Vec<&Value>, Vec<&Value>) = own.iter().partition(|one| one["error"].is_string());
        let trouble = match bad.first().and_then(|one| one["error"].as_str()) {
            Some(words) if rounds.is_empty() => Some(words.to_owned()),
            Some(words) => Some(format!("{} of {} rounds: {words}", bad.len(), own.len())),
            None if own.is_empty() => Some(engine.missing.clone().unwrap_or_else(|| "not run".into())),
            None => None,
        };
        let kind = bad.first().and_then(|one| one["error_kind"].as_str()).unwrap_or_default();
        let brief = match kind {
            _ if own.is_empty() && engine.missing.is_some() => "not here",
            _ if own.is_empty() => "not run",
            "timed_out" => "timed out",
            "refused" => "cannot",
            "wrong" => "wrong answer",
            _ => "failed",
        };
        Standing { engine: engine.name.clone(), rounds, trouble, brief }
    };
    let standings = document.engines.iter().map(standing).collect();
    Case { section, workload, threads, standings }
}

impl Case<'_> {
    /// `readrandom`, `readrandom, 2 threads`.
    pub(crate) fn label(&self) -> String {
        match self.threads {
            1 => self.workload.clone(),
            threads => format!("{}, {threads} threads", self.workload),
        }
    }

    /// How azekura stands to its best peer; `None` if either has no figure.
    pub(crate) fn verdict(&self) -> Option<Verdict> {
        let goal = &self.section.goal;
        let ours = self.standings.iter().find(|standing| standing.engine == OURS)?;
        let own = ours.goal(goal)?;
        let peers = self.standings.iter().filter(|standing| !registry::is_ours(&standing.engine));
        let (best, theirs) = peers
            .filter_map(|peer| Some((peer, peer.goal(goal)?)))
            .max_by(|(_, one), (_, other)| better(goal, *one).total_cmp(&better(goal, *other)))?;
        let ratios: Vec<f64> = ours.rounds.iter().filter_map(|mine| compare_round(goal, mine, &best.rounds)).collect();
        let low = ratios.iter().copied().reduce(f64::min);
        let high = ratios.iter().copied().reduce(f64::max);
        let ratio = oriented(goal, own, theirs)?;
        Some(Verdict { peer: best.engine.clone(), ratio, range: low.zip(high) })
    }

    /// The engine with the best median.
    pub(crate) fn best(&self) -> Option<&str> {
        let goal = &self.section.goal;
        let with = self.standings.iter().filter_map(|standing| Some((standing, standing.goal(goal)?)));
        let best = with.max_by(|(_, one), (_, other)| better(goal, *one).total_cmp(&better(goal, *other)));
        best.map(|(standing, _)| standing.engine.as_str())
    }
}

fn compare_round(goal: &Goal, mine: &Value, theirs: &[&Value]) -> Option<f64> {
    let same = theirs.iter().find(|one| one["round"] == mine["round"])?;
    oriented(goal, figure(mine, &goal.field)?, figure(same, &goal.field)?)
}

/// Larger is better, whichever way the figure goes.
fn better(goal: &Goal, number: f64) -> f64 {
    if goal.less_is_better { -number } else { number }
}

/// Above 1 if `ours` is better.
fn oriented(goal: &Goal, ours: f64, theirs: f64) -> Option<f64> {
    if goal.less_is_better { ratio(theirs, ours) } else { ratio(ours, theirs) }
}

impl Standing<'_> {
    /// The median over rounds of a field; `None` if no round has it.
    pub(crate) fn median(&self, field: &str) -> Option<f64> {
        let numbers: Vec<f64> = self.rounds.iter().filter_map(|round| figure(round, field)).collect();
        (!numbers.is_empty()).then(|| median(numbers))
    }

    /// The figure that engines are compared by; 0 is no figure.
    pub(crate) fn goal(&self, goal: &Goal) -> Option<f64> {
        self.median(&goal.field).filter(|number| *number > 0.0)
    }

    /// Rounds with figures.
    pub(crate) fn round_count(&self) -> usize {
        self.rounds.len()
    }

    /// The largest of a field over rounds, for what must not be averaged away.
    pub(crate) fn largest(&self, field: &str) -> Option<f64> {
        self.rounds.iter().filter_map(|round| figure(round, field)).reduce(f64::max)
    }

    /// A field's course over the seconds of the middle round by the goal: neither the best nor the worst is shown.
    pub(crate) fn course(&self, goal: &Goal, field: &str) -> Vec<(f64, f64)> {
        let mut rounds = self.rounds.clone();
        let key = |round: &Value| figure(round, &goal.field).unwrap_or(0.0);
        rounds.sort_by(|one, other| key(one).total_cmp(&key(other)));
        let Some(middle) = rounds.get(rounds.len() / 2) else { return Vec::new() };
        let point = |one: &Value| Some((one["s"].as_f64()?, one[field].as_f64()?));
        match middle["series"].as_array() {
            Some(series) => series.iter().filter_map(point).collect(),
            None if field == "ops_per_s" => {
                let seconds = middle["intervals_ops_per_s"].as_array().map_or(&[][..], Vec::as_slice);
                seconds.iter().enumerate().filter_map(|(i, rate)| Some((i as f64 + 1.0, rate.as_f64()?))).collect()
            }
            None => Vec::new(),
        }
    }

    /// Why there is no figure, in a word or two.
    pub(crate) fn brief(&self) -> &'static str {
        self.brief
    }

    /// Everything that should be said beside the figures.
    pub(crate) fn remarks(&self) -> Option<String> {
        let mut words: Vec<Cow<'_, str>> = self.trouble.iter().map(|one| Cow::from(one.as_str())).collect();
        if let Some(lost) = self.largest("lost_records").filter(|lost| *lost > 0.0) {
            let holes = self.largest("lost_holes").filter(|holes| *holes > 0.0);
            let holes =
                holes.map_or_else(String::new, |holes| format!(", {holes:.0} of them with later ones still there"));
            words.push(format!("lost {lost:.0} records{holes}").into());
        }
        if self.rounds.iter().any(|round| round["settled"] == Value::Bool(false)) {
            words.push("did not come to rest".into());
        }
        (!words.is_empty()).then(|| words.join("; "))
    }
}

/// A number of a measurement: a field of its own, or one of its `extra` or `engine_stats`.
pub(crate) fn figure(measurement: &Value, field: &str) -> Option<f64> {
    let places = [&measurement[field], &measurement["extra"][field], &measurement["engine_stats"][field]];
    places.into_iter().find_map(Value::as_f64).filter(|number| number.is_finite())
}

#[cfg(test)]
mod tests {
    use super::{Verdict, cases, figure, ratio};
    use crate::report::document::Document;
    use crate::report::document::tests::sample;
    use serde_json::json;

    #[test]
    fn ratios_without_a_number_are_none() {
        assert_eq!(ratio(3.0, 2.0), Some(1.5));
        for (top, bottom) in [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (f64::NAN, 1.0), (1.0, f64::INFINITY)] {
            assert_eq!(ratio(top, bottom), None, "{top} / {bottom}");
        }
    }

    #[test]
    fn cases_come_by_workload_and_threads() {
        let document = sample();
        let labels: Vec<String> = cases(&document, &document.sections[0]).iter().map(super::Case::label).collect();
        assert_eq!(labels, ["readrandom", "readrandom, 2 threads", "overwrite"]);
    }

    #[test]
    fn verdicts_are_ratios_of_medians_with_the_range_of_rounds() {
        let document = sample();
        let all = cases(&document, &document.sections[0]);
        // azekura 300, 100, 200; fjall 100, 100, 400: medians 200 and 100
        let verdict = all[0].verdict().unwrap();
        assert_eq!(verdict, Verdict { peer: "fjall".into(), ratio: 2.0, range: Some((0.5, 3.0)) });
        assert!(verdict.wins() && verdict.disputed());
        assert_eq!(all[0].best(), Some("azekura"));
        // azekura 50, fjall 100 in the only common round
        let loss = all[2].verdict().unwrap();
        assert!(!loss.wins() && !loss.disputed() && loss.ratio == 0.5, "{loss:?}");
        assert_eq!(all[2].best(), Some("fjall"));
    }

    #[test]
    fn what_is_azekura_is_no_peer_of_azekura() {
        let text = include_str!("sample.json").replace("\"fjall\"", "\"azekura-pmem\"");
        let document = Document::parse(&text).unwrap();
        let all = cases(&document, &document.sections[0]);
        assert!(all.iter().all(|case| case.verdict().is_none()));
        assert_eq!(all[2].best(), Some("azekura-pmem"));
    }

    #[test]
    fn less_can_be_better() {
        let document = sample();
        let all = cases(&document, &document.sections[1]);
        let verdict = all[0].verdict().unwrap();
        assert_eq!((verdict.ratio, verdict.peer.as_str()), (4.0, "fjall"), "10 ms against 40 ms");
        assert_eq!(all[0].best(), Some("azekura"));
    }

    #[test]
    fn trouble_is_told_in_words() {
        let document = sample();
        let all = cases(&document, &document.sections[0]);
        let remarks = |case: usize, engine: usize| all[case].standings[engine].remarks();
        assert_eq!(remarks(0, 0), None);
        assert_eq!(remarks(0, 2).as_deref(), Some("not in this build"));
        assert_eq!(remarks(1, 1).as_deref(), Some("timed out after 5 s"));
        assert_eq!(remarks(2, 1).as_deref(), Some("1 of 2 rounds: <disk> full; did not come to rest"));
        assert!(all[1].verdict().is_none(), "no peer has a figure");
        let brief = |case: usize, engine: usize| all[case].standings[engine].brief();
        assert_eq!((brief(0, 2), brief(1, 1), brief(2, 1)), ("not here", "timed out", "failed"));
        let recovery = cases(&document, &document.sections[1]);
        assert_eq!(recovery[0].standings[1].remarks().as_deref(), Some("lost 1200 records"));
    }

    #[test]
    fn courses_are_those_of_the_middle_round() {
        let document = sample();
        let all = cases(&document, &document.sections[0]);
        let goal = &document.sections[0].goal;
        assert_eq!(all[0].standings[0].course(goal, "ops_per_s"), [(1.0, 190.0), (2.0, 210.0)]);
        assert_eq!(all[0].standings[1].course(goal, "ops_per_s"), [(1.0, 99.0), (2.0, 101.0)], "from intervals");
        assert!(all[0].standings[0].course(goal, "space_amp").is_empty());
    }

    #[test]
    fn figures_are_looked_for_in_three_places() {
        let one = json!({"a": 1.5, "b": null, "extra": {"c": 2}, "engine_stats": {"b": 3, "d": "four"}});
        let found = ["a", "b", "c", "d", "e"].map(|field| figure(&one, field));
        assert_eq!(found, [Some(1.5), Some(3.0), Some(2.0), None, None]);
    }
}
