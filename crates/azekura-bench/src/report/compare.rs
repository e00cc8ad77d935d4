//! From the figures of single rounds to medians, ratios to the best peer, and their ranges. Reads figures by name: a
//! missing figure stays missing.

use crate::engine::api::object;
use crate::engine::registry::is_ours;
use crate::measure::meter::median;
use serde_json::{Map, Value, json};

/// `top / bottom`, if that is a number above 0.
pub(crate) fn ratio(top: f64, bottom: f64) -> Option<f64> {
    Some(top / bottom).filter(|ratio| ratio.is_finite() && *ratio > 0.0)
}

/// A figure of a measurement: a field of its own or one of its `engine_stats`.
pub(crate) fn figure(row: &Value, field: &str) -> Option<f64> {
    [&row[field], &row["engine_stats"][field]].into_iter().find_map(Value::as_f64).filter(|number| number.is_finite())
}

fn ops_per_s(row: &Value) -> Option<f64> {
    figure(row, "ops_per_s").filter(|rate| *rate > 0.0)
}

/// The rounds of one engine with one workload and one number of threads.
struct Case<'a> {
    engine: &'a str,
    workload: &'a Value,
    threads: u64,
    /// Every round.
    rounds: Vec<&'a Value>,
    /// The rounds that have figures.
    good: Vec<&'a Value>,
}

/// Groups rows, in the order in which their cases first appear.
fn cases(rows: &[Value]) -> Vec<Case<'_>> {
    let mut cases: Vec<Case<'_>> = Vec::new();
    for row in rows {
        let (engine, workload) = (row["engine"].as_str().unwrap_or_default(), &row["workload"]);
        let threads = row["threads"].as_u64().unwrap_or(1);
        let known = |case: &Case<'_>| (case.engine, case.workload, case.threads) == (engine, workload, threads);
        let at = cases.iter().position(known).unwrap_or_else(|| {
            cases.push(Case { engine, workload, threads, rounds: Vec::new(), good: Vec::new() });
            cases.len() - 1
        });
        cases[at].rounds.push(row);
        cases[at].good.extend(row["error"].is_null().then_some(row));
    }
    cases
}

impl Case<'_> {
    /// The median of operations per second, by which engines are compared.
    fn ops_per_s(&self) -> Option<f64> {
        median(self.good.iter().filter_map(|round| ops_per_s(round)).collect())
    }

    /// The best peer, the ratio of medians to it, above 1 if this engine is faster, and the least and largest ratio of
    /// a round. The engines of azekura are not peers of each other.
    fn best_peer<'c>(&self, cases: &'c [Case<'_>]) -> Option<(&'c str, f64, Option<[f64; 2]>)> {
        let own = self.ops_per_s()?;
        let is_peer = |one: &&Case<'_>| {
            (one.workload, one.threads) == (self.workload, self.threads)
                && one.engine != self.engine
                && !(is_ours(one.engine) && is_ours(self.engine))
        };
        let peers = cases.iter().filter(is_peer).filter_map(|peer| Some((peer, peer.ops_per_s()?)));
        let (best, theirs) = peers.max_by(|a, b| a.1.total_cmp(&b.1))?;
        let ratios = self.good.iter().filter_map(|mine| {
            let theirs = best.good.iter().find(|theirs| theirs["round"] == mine["round"])?;
            ratio(ops_per_s(mine)?, ops_per_s(theirs)?)
        });
        let range = ratios.map(|ratio| [ratio, ratio]).reduce(|a, b| [a[0].min(b[0]), a[1].max(b[1])]);
        Some((best.engine, ratio(own, theirs)?, range))
    }

    /// The medians of all figures as one object; a failed round if there are no figures.
    fn medians(&self) -> Map<String, Value> {
        let objects: Vec<_> = self.good.iter().filter_map(|round| round.as_object()).collect();
        let first_bad = self.rounds.iter().find(|round| !round["error"].is_null());
        let mut medians = if objects.is_empty() { object(json!(first_bad)) } else { median_object(&objects) };
        if let Some(bad) = first_bad {
            let (bad_rounds, all) = (self.rounds.len() - self.good.len(), self.rounds.len());
            let some = format!("{bad_rounds} of {all} rounds: {}", bad["error"].as_str().unwrap_or_default());
            medians.insert("error".into(), if bad_rounds == all { bad["error"].clone() } else { json!(some) });
            medians.insert("error_kind".into(), bad["error_kind"].clone());
        }
        medians
    }
}

/// The median of each number over several objects; the other values are those of the first.
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
    let cases = cases(rows);
    let row = |own: &Case<'_>| {
        let same = cases.iter().filter(|other| (other.workload, other.engine) == (own.workload, own.engine));
        let fewest = same.min_by_key(|other| other.threads).filter(|fewest| fewest.threads < own.threads);
        let alone = fewest.and_then(Case::ops_per_s);
        let best = own.best_peer(&cases);
        let mut row = own.medians();
        row.shift_remove("round");
        row.extend(object(json!({
            "best_peer": best.map(|(peer, ..)| peer), "ratio_to_best_peer": best.map(|(_, ratio, _)| ratio),
            "ratio_range": best.and_then(|(.., range)| range),
            "scaling": own.ops_per_s().zip(alone).and_then(|(own, alone)| ratio(own, alone)),
            "settings": settings, "conditions": conditions, "rounds": own.rounds,
        })));
        row
    };
    cases.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::{figure, ratio, run_objects};
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
}
