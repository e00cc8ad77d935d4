//! Medians over rounds, and ratios between engines.

use crate::engine::registry;
use crate::machine::conditions::Conditions;
use crate::report::measurement::Measurement;
use serde_json::{Map, Value, json};

/// What all rounds of one workload on one engine say.
#[derive(Clone, Debug)]
pub(crate) struct Summary {
    /// The field-wise medians.
    pub(crate) median: Measurement,
    /// Every round.
    pub(crate) rounds: Vec<Measurement>,
    /// Median `ops_per_s` per median of the best other engine; `None` when alone.
    pub(crate) ratio_to_best_peer: Option<f64>,
    /// That other engine.
    pub(crate) best_peer: Option<String>,
    /// Lowest and highest ratio to that engine within one round.
    pub(crate) ratio_range: Option<(f64, f64)>,
    /// Median `ops_per_s` per that of the same engine with the fewest threads of the run; `None` for the fewest.
    pub(crate) scaling: Option<f64>,
}

/// The median of some numbers: the middle one, or the mean of the middle two. 0 of none.
pub(crate) fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    let middle = numbers.len() / 2;
    match numbers.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => numbers[middle],
        _ => f64::midpoint(numbers[middle - 1], numbers[middle]),
    }
}

/// The median of each number over several JSON objects; what is no number is taken from the first that has it.
fn median_object(objects: &[&Map<String, Value>]) -> Map<String, Value> {
    let Some(first) = objects.first() else { return Map::new() };
    let merge = |(name, value): (&String, &Value)| {
        let numbers: Vec<f64> = objects.iter().filter_map(|object| object.get(name)?.as_f64()).collect();
        let merged = match value {
            Value::Number(number) if number.is_f64() => json!(median(numbers)),
            Value::Number(_) => json!(median(numbers).round() as u64),
            Value::Object(_) => {
                let parts: Vec<_> = objects.iter().filter_map(|object| object.get(name)?.as_object()).collect();
                Value::Object(median_object(&parts))
            }
            other => other.clone(),
        };
        (name.clone(), merged)
    };
    first.iter().map(merge).collect()
}

/// The field-wise median of those rounds of one engine that have figures; the intervals are those of the first of
/// them. Rounds without figures are told in `error`.
fn median_measurement(rounds: &[Measurement]) -> Option<Measurement> {
    let (good, bad): (Vec<&Measurement>, Vec<&Measurement>) = rounds.iter().partition(|round| round.error.is_none());
    let Some(first_bad) = bad.first() else { return median_of(&good) };
    let mut row = if good.is_empty() { (*first_bad).clone() } else { median_of(&good)? };
    let words = first_bad.error.as_deref().unwrap_or_default();
    row.error = Some(match bad.len() == rounds.len() {
        true => words.to_owned(),
        false => format!("{} of {} rounds: {words}", bad.len(), rounds.len()),
    });
    row.error_kind = first_bad.error_kind;
    Some(row)
}

fn median_of(rounds: &[&Measurement]) -> Option<Measurement> {
    let values: Vec<Value> = rounds.iter().filter_map(|round| serde_json::to_value(round).ok()).collect();
    let objects: Vec<_> = values.iter().filter_map(Value::as_object).collect();
    serde_json::from_value(Value::Object(median_object(&objects))).ok()
}

/// Groups measurements by workload, threads and engine, in the order they first appear.
pub(crate) fn summarise(measurements: &[Measurement]) -> Vec<Summary> {
    let mut groups: Vec<Vec<Measurement>> = Vec::new();
    for one in measurements {
        let same = |group: &&mut Vec<Measurement>| like(&group[0], one) && group[0].engine == one.engine;
        match groups.iter_mut().find(same) {
            Some(group) => group.push(one.clone()),
            None => groups.push(vec![one.clone()]),
        }
    }
    let mut summaries: Vec<Summary> = groups
        .into_iter()
        .filter_map(|rounds| {
            let median = median_measurement(&rounds)?;
            Some(Summary {
                median,
                rounds,
                ratio_to_best_peer: None,
                best_peer: None,
                ratio_range: None,
                scaling: None,
            })
        })
        .collect();
    let all = summaries.clone();
    for summary in &mut summaries {
        compare(summary, &all);
    }
    summaries
}

/// Whether two measurements may be compared.
fn like(one: &Measurement, other: &Measurement) -> bool {
    one.workload == other.workload && one.threads == other.threads
}

/// Fills in how one engine stands to the best other one.
fn compare(summary: &mut Summary, all: &[Summary]) {
    let own = &summary.median;
    let itself = all.iter().filter(|s| s.median.workload == own.workload && s.median.engine == own.engine);
    if let Some(fewest) = itself.min_by_key(|s| s.median.threads)
        && fewest.median.threads < own.threads
        && fewest.median.ops_per_s > 0.0
        && own.ops_per_s > 0.0
    {
        summary.scaling = Some(own.ops_per_s / fewest.median.ops_per_s);
    }
    // Of what is azekura one is no peer of the other.
    let peers = |other: &str| other != own.engine && !(registry::is_ours(other) && registry::is_ours(&own.engine));
    let others = all.iter().filter(|s| like(&s.median, own) && peers(&s.median.engine));
    let others = others.filter(|s| s.median.ops_per_s > 0.0 && own.ops_per_s > 0.0);
    let Some(best) = others.max_by(|a, b| a.median.ops_per_s.total_cmp(&b.median.ops_per_s)) else { return };
    let ratios = summary.rounds.iter().filter_map(|mine| {
        let theirs = best.rounds.iter().find(|theirs| theirs.round == mine.round)?;
        (mine.error.is_none() && theirs.error.is_none()).then(|| mine.ops_per_s / theirs.ops_per_s)
    });
    let (low, high) = ratios.fold((f64::MAX, 0.0f64), |(low, high), ratio| (low.min(ratio), high.max(ratio)));
    summary.ratio_to_best_peer = Some(own.ops_per_s / best.median.ops_per_s);
    summary.best_peer = Some(best.median.engine.clone());
    summary.ratio_range = (high > 0.0).then_some((low, high));
}

impl Summary {
    /// The JSON object of one run: the medians, how they compare, every round, and the conditions.
    pub(crate) fn json(&self, conditions: &Conditions, settings: &Value) -> Value {
        let mut object = match serde_json::to_value(&self.median) {
            Ok(Value::Object(object)) => object,
            _ => Map::new(),
        };
        object.remove("round");
        object.insert("best_peer".into(), json!(self.best_peer));
        object.insert("ratio_to_best_peer".into(), json!(self.ratio_to_best_peer));
        object.insert("ratio_range".into(), json!(self.ratio_range));
        object.insert("scaling".into(), json!(self.scaling));
        object.insert("settings".into(), settings.clone());
        object.insert("conditions".into(), json!(conditions));
        object.insert("rounds".into(), json!(self.rounds));
        Value::Object(object)
    }
}

#[cfg(test)]
mod tests {
    use super::{median, summarise};
    use crate::failure::{Kind, Told};
    use crate::report::measurement::Measurement;
    use crate::report::measurement::tests::{sample, sample_task};

    #[test]
    fn what_is_azekura_is_no_peer_of_azekura() {
        let all = [sample("azekura", 1, 4.0), sample("azekura-pmem", 1, 1.0), sample("fjall", 1, 8.0)];
        let peers: Vec<Option<String>> = summarise(&all).into_iter().map(|summary| summary.best_peer).collect();
        assert_eq!(peers, [Some("fjall".into()), Some("fjall".into()), Some("azekura-pmem".into())]);
        let alone = summarise(&all[..2]);
        assert!(alone.iter().all(|summary| summary.best_peer.is_none()));
    }

    #[test]
    fn medians_are_in_the_middle() {
        assert_eq!(median(vec![]), 0.0);
        assert_eq!(median(vec![3.0]), 3.0);
        assert_eq!(median(vec![9.0, 1.0, 3.0]), 3.0);
        assert_eq!(median(vec![4.0, 1.0, 3.0, 9.0]), 3.5);
    }

    #[test]
    fn ratios_are_of_medians_and_the_range_is_of_rounds() {
        // seconds for 100 operations: azekura 1, 2, 4 and fjall 4, 4, 4
        let measurements = [
            sample("azekura", 1, 1.0),
            sample("fjall", 1, 4.0),
            sample("azekura", 2, 2.0),
            sample("fjall", 2, 4.0),
            sample("azekura", 3, 4.0),
            sample("fjall", 3, 4.0),
        ];
        let summaries = summarise(&measurements);
        assert_eq!(summaries.len(), 2);
        let ours = &summaries[0];
        assert_eq!((ours.median.engine.as_str(), ours.rounds.len()), ("azekura", 3));
        assert_eq!(ours.median.ops_per_s, 50.0);
        assert_eq!(ours.ratio_to_best_peer, Some(2.0));
        assert_eq!(ours.best_peer.as_deref(), Some("fjall"));
        assert_eq!(ours.ratio_range, Some((1.0, 4.0)));
        assert_eq!(summaries[1].ratio_to_best_peer, Some(0.5));
    }

    #[test]
    fn an_engine_alone_has_no_ratio() {
        let summaries = summarise(&[sample("azekura", 1, 1.0)]);
        assert_eq!(summaries[0].ratio_to_best_peer, None);
        assert_eq!(summaries[0].median.write_amp, Some(4.0));
    }

    #[test]
    fn rounds_without_figures_are_told_and_left_out() {
        let (_, plan) = sample_task("fjall", 2);
        let hung = Measurement::failed("fjall", &plan, &Told { kind: Kind::TimedOut, error: "timed out".into() });
        let good = [sample("azekura", 1, 1.0), sample("fjall", 1, 4.0), sample("azekura", 2, 1.0)];
        let summaries = summarise(&[&good[..], std::slice::from_ref(&hung)].concat());
        assert_eq!(summaries[1].median.ops_per_s, 25.0);
        assert_eq!(summaries[1].median.error.as_deref(), Some("1 of 2 rounds: timed out"));
        assert_eq!(summaries[0].ratio_range, Some((4.0, 4.0)));
        let alone = summarise(&[good[0].clone(), hung]);
        assert_eq!(alone[1].median.error.as_deref(), Some("timed out"));
        assert_eq!((alone[0].ratio_to_best_peer, alone[1].ratio_to_best_peer), (None, None));
    }

    #[test]
    fn thread_counts_are_compared_apart_and_give_the_scaling() {
        let two = |engine: &str, seconds| Measurement { threads: 2, ..sample(engine, 1, seconds) };
        let all = [sample("azekura", 1, 4.0), sample("fjall", 1, 4.0), two("azekura", 1.0), two("fjall", 2.0)];
        let summaries = summarise(&all);
        assert_eq!(summaries.iter().map(|s| s.scaling).collect::<Vec<_>>(), [None, None, Some(4.0), Some(2.0)]);
        assert_eq!((summaries[0].ratio_to_best_peer, summaries[2].ratio_to_best_peer), (Some(1.0), Some(2.0)));
    }
}
