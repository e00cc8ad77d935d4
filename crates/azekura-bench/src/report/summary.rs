//! Medians over rounds, and ratios between engines.

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

/// The field-wise median of the rounds of one engine; the intervals are those of the first round.
fn median_measurement(rounds: &[Measurement]) -> Option<Measurement> {
    let values: Vec<Value> = rounds.iter().filter_map(|round| serde_json::to_value(round).ok()).collect();
    let objects: Vec<_> = values.iter().filter_map(Value::as_object).collect();
    serde_json::from_value(Value::Object(median_object(&objects))).ok()
}

/// Groups measurements by workload and engine, in the order they first appear.
pub(crate) fn summarise(measurements: &[Measurement]) -> Vec<Summary> {
    let mut groups: Vec<Vec<Measurement>> = Vec::new();
    for one in measurements {
        let same = |group: &&mut Vec<Measurement>| group[0].workload == one.workload && group[0].engine == one.engine;
        match groups.iter_mut().find(same) {
            Some(group) => group.push(one.clone()),
            None => groups.push(vec![one.clone()]),
        }
    }
    let mut summaries: Vec<Summary> = groups
        .into_iter()
        .filter_map(|rounds| {
            let median = median_measurement(&rounds)?;
            Some(Summary { median, rounds, ratio_to_best_peer: None, best_peer: None, ratio_range: None })
        })
        .collect();
    let all = summaries.clone();
    for summary in &mut summaries {
        compare(summary, &all);
    }
    summaries
}

/// Fills in how one engine stands to the best other one.
fn compare(summary: &mut Summary, all: &[Summary]) {
    let own = &summary.median;
    let others = all.iter().filter(|s| s.median.workload == own.workload && s.median.engine != own.engine);
    let Some(best) = others.max_by(|a, b| a.median.ops_per_s.total_cmp(&b.median.ops_per_s)) else { return };
    let ratios = summary.rounds.iter().filter_map(|mine| {
        let theirs = best.rounds.iter().find(|theirs| theirs.round == mine.round)?;
        Some(mine.ops_per_s / theirs.ops_per_s)
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
        object.insert("settings".into(), settings.clone());
        object.insert("conditions".into(), json!(conditions));
        object.insert("rounds".into(), json!(self.rounds));
        Value::Object(object)
    }
}

#[cfg(test)]
mod tests {
    use super::{median, summarise};
    use crate::report::measurement::tests::sample;

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
}
