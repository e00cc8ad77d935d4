//! Variants interleaved, A B A B, and what their rounds say together. What is missing or 0 makes no ratio: it becomes
//! null, never a number.

use crate::experiment::experiment::Context;
use crate::failure::Result;
use crate::report::figures::ratio;
use crate::report::summary::median;
use serde_json::{Map, Value, json};

/// One thing that is done in each round.
#[derive(Clone, Debug)]
pub(crate) struct Variant {
    pub(crate) name: String,
    /// What its child is asked to do.
    pub(crate) task: Value,
}

/// All rounds of all variants.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rounds {
    /// Variants by name, each with its answer in every round.
    variants: Vec<(String, Vec<Map<String, Value>>)>,
}

/// A ratio of medians, and the least and largest ratio within one round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Ratio {
    pub(crate) median: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

/// Runs every variant once in each round, in turns.
pub(crate) fn interleave(context: &Context<'_>, variants: &[Variant], rounds: u32) -> Result<Rounds> {
    let mut answers = Rounds::default();
    for round in 1..=rounds {
        for variant in variants {
            let answer = context.child(&variant.task).map_err(|failure| format!("{}: {failure}", variant.name))?;
            eprintln!("{} round {round} of {rounds}: {}", variant.name, Value::Object(answer.clone()));
            answers.add(&variant.name, answer);
        }
    }
    Ok(answers)
}

impl Rounds {
    /// Adds the next round of a variant.
    pub(crate) fn add(&mut self, variant: &str, answer: Map<String, Value>) {
        match self.variants.iter_mut().find(|(name, _)| name == variant) {
            Some((_, rounds)) => rounds.push(answer),
            None => self.variants.push((variant.to_owned(), vec![answer])),
        }
    }

    /// Adds all rounds of others.
    pub(crate) fn extend(&mut self, other: Rounds) {
        for (variant, rounds) in other.variants {
            rounds.into_iter().for_each(|round| self.add(&variant, round));
        }
    }

    fn rounds(&self, variant: &str) -> &[Map<String, Value>] {
        self.variants.iter().find(|(name, _)| name == variant).map_or(&[], |(_, rounds)| rounds)
    }

    /// The median of a field of a variant; `None` if no round has it.
    pub(crate) fn median(&self, variant: &str, field: &str) -> Option<f64> {
        let numbers: Vec<f64> = self.rounds(variant).iter().filter_map(|round| number(round, field)).collect();
        (!numbers.is_empty()).then(|| median(numbers))
    }

    /// Variant `top` per variant `bottom` by a field.
    pub(crate) fn ratio(&self, field: &str, top: &str, bottom: &str) -> Option<Ratio> {
        let median = ratio(self.median(top, field)?, self.median(bottom, field)?)?;
        let pairs = self.rounds(top).iter().zip(self.rounds(bottom));
        let singles: Vec<f64> =
            pairs.filter_map(|(one, other)| ratio(number(one, field)?, number(other, field)?)).collect();
        let low = singles.iter().copied().reduce(f64::min).unwrap_or(median);
        let high = singles.iter().copied().reduce(f64::max).unwrap_or(median);
        Some(Ratio { median, low, high })
    }

    /// Writes a ratio and its range into an answer; null for both if there is none.
    pub(crate) fn put_ratio(&self, answer: &mut Map<String, Value>, name: &str, field: &str, top: &str, bottom: &str) {
        let ratio = self.ratio(field, top, bottom);
        answer.insert(name.to_owned(), json!(ratio.map(|ratio| ratio.median)));
        let ranges = answer.entry("ranges").or_insert_with(|| json!({}));
        ranges[name] = json!(ratio.map(|ratio| [ratio.low, ratio.high]));
    }

    /// Every round of every variant.
    pub(crate) fn json(&self) -> Value {
        self.variants.iter().map(|(name, rounds)| (name.clone(), json!(rounds))).collect::<Map<_, _>>().into()
    }
}

fn number(round: &Map<String, Value>, field: &str) -> Option<f64> {
    round.get(field).and_then(Value::as_f64).filter(|number| number.is_finite())
}

#[cfg(test)]
mod tests {
    use super::{Ratio, Rounds};
    use serde_json::{Map, Value, json};

    fn rounds(variants: &[(&str, &[Value])]) -> Rounds {
        let mut all = Rounds::default();
        for (name, values) in variants {
            for value in *values {
                all.add(name, json!({"ns": value}).as_object().unwrap().clone());
            }
        }
        all
    }

    #[test]
    fn ratios_are_of_medians_and_ranges_of_rounds() {
        let all = rounds(&[("a", &[json!(10), json!(40), json!(30)]), ("b", &[json!(20.0), json!(20), json!(10)])]);
        assert_eq!(all.ratio("ns", "a", "b"), Some(Ratio { median: 1.5, low: 0.5, high: 3.0 }));
        assert_eq!(all.median("a", "ns"), Some(30.0));
    }

    #[test]
    fn what_is_missing_or_zero_makes_no_ratio() {
        let all = rounds(&[
            ("good", &[json!(10), json!(10)]),
            ("zero", &[json!(0), json!(0)]),
            ("null", &[json!(null), json!("ten")]),
            ("half", &[json!(null), json!(20)]),
        ]);
        assert_eq!(all.ratio("ns", "good", "zero"), None);
        assert_eq!(all.ratio("ns", "zero", "good"), None);
        assert_eq!(all.ratio("ns", "null", "good"), None);
        assert_eq!(all.ratio("ns", "good", "nobody"), None);
        assert_eq!(all.ratio("s", "good", "good"), None);
        assert_eq!(all.ratio("ns", "half", "good"), Some(Ratio { median: 2.0, low: 2.0, high: 2.0 }));
        let mut answer = Map::new();
        all.put_ratio(&mut answer, "some", "ns", "half", "good");
        all.put_ratio(&mut answer, "none", "ns", "good", "zero");
        assert_eq!(
            Value::Object(answer),
            json!({"some": 2.0, "none": null, "ranges": {"some": [2.0, 2.0], "none": null}})
        );
    }

    #[test]
    fn every_round_is_in_the_answer() {
        let mut all = rounds(&[("a", &[json!(1), json!(2)])]);
        assert_eq!(all.json(), json!({"a": [{"ns": 1}, {"ns": 2}]}));
        all.extend(rounds(&[("b", &[json!(3)]), ("a", &[json!(4)])]));
        assert_eq!(all.json(), json!({"a": [{"ns": 1}, {"ns": 2}, {"ns": 4}], "b": [{"ns": 3}]}));
    }
}
