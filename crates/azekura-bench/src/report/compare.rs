//! From the figures of single rounds to medians, ratios to the best peer, and their ranges. Reads figures by name: a
//! missing figure stays missing.

use crate::engine::api::object;
use crate::engine::registry::is_ours;
use crate::task::child::median;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// The figure that engines are compared by.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Goal {
    pub(crate) field: String,
    pub(crate) unit: String,
    pub(crate) less_is_better: bool,
}

impl Goal {
    /// Operations per second.
    pub(crate) fn throughput() -> Goal {
        Goal { field: "ops_per_s".into(), unit: "ops/s".into(), less_is_better: false }
    }

    /// Above 1 if `one` is better than `other`.
    fn ratio(&self, one: f64, other: f64) -> Option<f64> {
        if self.less_is_better { ratio(other, one) } else { ratio(one, other) }
    }
}

/// `top / bottom`, if that is a number above 0.
pub(crate) fn ratio(top: f64, bottom: f64) -> Option<f64> {
    Some(top / bottom).filter(|ratio| ratio.is_finite() && *ratio > 0.0)
}

/// A figure of a measurement: a field of its own or one of its `engine_stats`.
pub(crate) fn figure(row: &Value, field: &str) -> Option<f64> {
    [&row[field], &row["engine_stats"][field]].into_iter().find_map(Value::as_f64).filter(|number| number.is_finite())
}

/// One workload with one number of threads.
#[derive(Clone, Debug)]
pub(crate) struct Case<'a> {
    pub(crate) workload: &'a str,
    pub(crate) threads: u64,
    /// One for each engine.
    pub(crate) standings: Vec<Standing<'a>>,
}

/// One engine in one case.
#[derive(Clone, Debug)]
pub(crate) struct Standing<'a> {
    pub(crate) engine: &'a str,
    /// Every round.
    pub(crate) rounds: Vec<&'a Value>,
    /// The rounds that have figures.
    pub(crate) good: Vec<&'a Value>,
}

/// How an engine stands to its best peer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Verdict<'a> {
    pub(crate) peer: &'a str,
    /// Ratio of medians, above 1 if the engine is better than the peer.
    pub(crate) ratio: f64,
    /// Least and largest ratio within one round; `None` if no round has both.
    pub(crate) range: Option<(f64, f64)>,
}

/// Groups rows by workload and threads, in the order in which they first appear.
pub(crate) fn cases<'a>(rows: &'a [Value], engines: &[&'a str]) -> Vec<Case<'a>> {
    let mut cases: Vec<Case<'a>> = Vec::new();
    for row in rows {
        let (workload, threads) = (row["workload"].as_str().unwrap_or_default(), row["threads"].as_u64().unwrap_or(1));
        let at = cases.iter().position(|case| (case.workload, case.threads) == (workload, threads));
        let standing = |engine: &&'a str| Standing { engine, rounds: Vec::new(), good: Vec::new() };
        let at = at.unwrap_or_else(|| {
            cases.push(Case { workload, threads, standings: engines.iter().map(standing).collect() });
            cases.len() - 1
        });
        if let Some(standing) = cases[at].standings.iter_mut().find(|standing| row["engine"] == standing.engine) {
            standing.rounds.push(row);
            standing.good.extend(row["error"].is_null().then_some(row));
        }
    }
    cases
}

/// The engines of some rows, in the order in which they first appear.
pub(crate) fn engines(rows: &[Value]) -> Vec<&str> {
    let mut engines: Vec<&str> = Vec::new();
    for engine in rows.iter().filter_map(|row| row["engine"].as_str()) {
        if !engines.contains(&engine) {
            engines.push(engine);
        }
    }
    engines
}

impl<'a> Case<'a> {
    /// How `own` stands to its best peer; `None` if either has no figure. The engines of azekura are not peers of each
    /// other.
    pub(crate) fn verdict(&self, own: &Standing<'_>, goal: &Goal) -> Option<Verdict<'a>> {
        let figure_of = own.goal(goal)?;
        let is_peer = |one: &&Standing<'_>| one.engine != own.engine && !(is_ours(one.engine) && is_ours(own.engine));
        let peers = self.standings.iter().filter(is_peer).filter_map(|peer| Some((peer, peer.goal(goal)?)));
        let (best, theirs) = peers.reduce(|a, b| if goal.ratio(b.1, a.1) >= Some(1.0) { b } else { a })?;
        let ratios = own.good.iter().filter_map(|mine| {
            let theirs = best.good.iter().find(|theirs| theirs["round"] == mine["round"])?;
            goal.ratio(figure(mine, &goal.field)?, figure(theirs, &goal.field)?)
        });
        let range = ratios.fold(None, |range: Option<(f64, f64)>, ratio| {
            let (low, high) = range.unwrap_or((ratio, ratio));
            Some((low.min(ratio), high.max(ratio)))
        });
        Some(Verdict { peer: best.engine, ratio: goal.ratio(figure_of, theirs)?, range })
    }

    /// The standing of an engine, or of azekura.
    pub(crate) fn of(&self, engine: &str) -> Option<&Standing<'a>> {
        self.standings.iter().find(|standing| standing.engine == engine)
    }
}

impl Standing<'_> {
    /// The median of a figure; `None` if no round has it.
    pub(crate) fn median(&self, field: &str) -> Option<f64> {
        median(self.good.iter().filter_map(|round| figure(round, field)).collect())
    }

    /// The largest of a figure, for what must not be averaged away.
    pub(crate) fn largest(&self, field: &str) -> Option<f64> {
        self.good.iter().filter_map(|round| figure(round, field)).reduce(f64::max)
    }

    /// The figure that engines are compared by; 0 is none.
    pub(crate) fn goal(&self, goal: &Goal) -> Option<f64> {
        self.median(&goal.field).filter(|number| *number > 0.0)
    }

    /// Why some rounds have no figures.
    pub(crate) fn error(&self) -> Option<String> {
        let error = self.rounds.iter().find_map(|round| round["error"].as_str())?;
        let (bad, all) = (self.rounds.len() - self.good.len(), self.rounds.len());
        Some(if bad == all { error.to_owned() } else { format!("{bad} of {all} rounds: {error}") })
    }

    /// The medians of all figures as one object; a failed round if there are no figures.
    pub(crate) fn medians(&self) -> Map<String, Value> {
        let objects: Vec<_> = self.good.iter().filter_map(|round| round.as_object()).collect();
        let first_bad = self.rounds.iter().find(|round| !round["error"].is_null());
        let mut medians = if objects.is_empty() { object(json!(first_bad)) } else { median_object(&objects) };
        if let Some(bad) = first_bad {
            medians.insert("error".into(), json!(self.error()));
            medians.insert("error_kind".into(), bad["error_kind"].clone());
        }
        medians
    }
}

/// The median of each number over several objects; what is not a number is taken from the first.
fn median_object(objects: &[&Map<String, Value>]) -> Map<String, Value> {
    let merge = |(name, value): (&String, &Value)| {
        let middle = || median(objects.iter().filter_map(|object| object.get(name)?.as_f64()).collect());
        let merged = match value {
            Value::Number(number) if number.is_f64() => json!(middle()),
            Value::Number(_) => json!(middle().map(|number| number.round() as u64)),
            Value::Object(_) => {
                let parts: Vec<_> = objects.iter().filter_map(|object| object.get(name)?.as_object()).collect();
                Value::Object(median_object(&parts))
            }
            other => other.clone(),
        };
        (name.clone(), merged)
    };
    objects.first().map_or_else(Map::new, |first| first.iter().map(merge).collect())
}

/// The JSON objects of a run, one for each workload, number of threads and engine.
pub(crate) fn run_objects(rows: &[Value], settings: &Value, conditions: &Value) -> Vec<Map<String, Value>> {
    let (goal, engines) = (Goal::throughput(), engines(rows));
    let cases = cases(rows, &engines);
    let mut objects = Vec::new();
    for (case, own) in cases.iter().flat_map(|case| case.standings.iter().map(move |own| (case, own))) {
        if own.rounds.is_empty() {
            continue;
        }
        let same_workload = cases.iter().filter(|other| other.workload == case.workload);
        let fewest = same_workload.min_by_key(|other| other.threads).filter(|fewest| fewest.threads < case.threads);
        let alone = fewest.and_then(|fewest| fewest.of(own.engine)?.goal(&goal));
        let verdict = case.verdict(own, &goal);
        let mut medians = own.medians();
        medians.shift_remove("round");
        medians.extend(object(json!({
            "best_peer": verdict.as_ref().map(|verdict| verdict.peer),
            "ratio_to_best_peer": verdict.as_ref().map(|verdict| verdict.ratio),
            "ratio_range": verdict.as_ref().and_then(|verdict| verdict.range),
            "scaling": own.goal(&goal).zip(alone).and_then(|(own, alone)| ratio(own, alone)),
            "settings": settings, "conditions": conditions, "rounds": own.rounds,
        })));
        objects.push(medians);
    }
    objects
}

#[cfg(test)]
mod tests {
    use super::{Goal, cases, engines, figure, ratio, run_objects};
    use crate::error::ErrorKind;
    use crate::task::measure::tests::{failed, sample};
    use serde_json::{Map, Value, json};

    fn objects(rows: &[Value]) -> Vec<Map<String, Value>> {
        run_objects(rows, &json!({}), &json!({}))
    }

    #[test]
    fn ratio_is_none_without_a_number() {
        assert_eq!(ratio(3.0, 2.0), Some(1.5));
        for (top, bottom) in [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (f64::NAN, 1.0), (1.0, f64::INFINITY)] {
            assert_eq!(ratio(top, bottom), None, "{top} / {bottom}");
        }
        let one = json!({"a": 1.5, "b": null, "engine_stats": {"b": 3, "d": "four"}});
        assert_eq!(["a", "b", "d", "e"].map(|field| figure(&one, field)), [Some(1.5), Some(3.0), None, None]);
    }

    #[test]
    fn ratio_is_of_medians_and_range_of_rounds() {
        // Seconds for 100 operations: azekura 1, 2, 4 and fjall 4, 4, 4.
        let rows = [(1, 1.0), (2, 2.0), (3, 4.0)]
            .map(|(round, seconds)| [sample("azekura", round, seconds), sample("fjall", round, 4.0)]);
        let objects = objects(&rows.concat());
        assert_eq!(objects.len(), 2);
        assert_eq!((&objects[0]["ops_per_s"], &objects[0]["ratio_to_best_peer"]), (&json!(50.0), &json!(2.0)));
        assert_eq!((&objects[0]["best_peer"], &objects[0]["ratio_range"]), (&json!("fjall"), &json!([1.0, 4.0])));
        assert_eq!((&objects[1]["ratio_to_best_peer"], objects[1].get("round")), (&json!(0.5), None));
        assert_eq!((objects[0]["rounds"].as_array().unwrap().len(), &objects[0]["n"]), (3, &json!(100)));
    }

    #[test]
    fn engines_of_azekura_are_not_peers() {
        let all = [sample("azekura", 1, 4.0), sample("azekura-pmem", 1, 1.0), sample("fjall", 1, 8.0)];
        let peers: Vec<Value> = objects(&all).iter().map(|object| object["best_peer"].clone()).collect();
        assert_eq!(peers, ["fjall", "fjall", "azekura-pmem"]);
        assert!(objects(&all[..2]).iter().all(|object| object["best_peer"].is_null()));
    }

    #[test]
    fn failed_rounds_are_left_out_and_reported() {
        let mut late = failed("fjall", ErrorKind::TimedOut);
        late["round"] = json!(2);
        let rows = [sample("azekura", 1, 1.0), sample("fjall", 1, 4.0), sample("azekura", 2, 1.0), late.clone()];
        let two = objects(&rows);
        assert_eq!((&two[1]["ops_per_s"], &two[1]["error"]), (&json!(25.0), &json!("1 of 2 rounds: why")));
        assert_eq!(two[0]["ratio_range"], json!([4.0, 4.0]));
        let alone = objects(&[rows[0].clone(), late]);
        assert_eq!((&alone[1]["error"], &alone[1]["ops_per_s"]), (&json!("why"), &json!(0.0)));
        assert!(alone[0]["ratio_to_best_peer"].is_null() && alone[1]["ratio_to_best_peer"].is_null());
    }

    #[test]
    fn scaling_is_to_the_fewest_threads() {
        let two = |engine: &str, seconds| {
            let mut row = sample(engine, 1, seconds);
            row["threads"] = json!(2);
            row
        };
        let rows = [sample("azekura", 1, 4.0), sample("fjall", 1, 4.0), two("azekura", 1.0), two("fjall", 2.0)];
        let scaling: Vec<Value> = objects(&rows).iter().map(|object| object["scaling"].clone()).collect();
        assert_eq!(scaling, [json!(null), json!(null), json!(4.0), json!(2.0)]);
    }

    #[test]
    fn less_can_be_better() {
        let mut rows = [sample("azekura", 1, 1.0), sample("fjall", 1, 1.0)];
        (rows[0]["open_ms"], rows[1]["open_ms"]) = (json!(10.0), json!(40.0));
        let goal = Goal { field: "open_ms".into(), unit: "ms".into(), less_is_better: true };
        let cases = cases(&rows, &engines(&rows));
        assert_eq!(cases[0].verdict(&cases[0].standings[0], &goal).unwrap().ratio, 4.0);
        assert_eq!(cases[0].verdict(&cases[0].standings[1], &goal).unwrap().ratio, 0.25);
    }
}
