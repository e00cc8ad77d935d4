//! Interleaves variants, A B A B, and combines their rounds. A missing figure or 0 makes no ratio: the field is null.

use crate::engine::object;
use crate::error::Result;
use crate::measure::meter::{median, ratio};
use crate::task::child::ask;
use anyhow::Context as _;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::path::Path;
use std::sync::LazyLock;
use std::time::Duration;

/// Time limit of one variant in one round.
const LIMIT: Duration = Duration::from_secs(600);

/// One experiment of the list.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Question {
    pub(crate) name: String,
    pub(crate) about: String,
    /// Fields of every answer that explain its figures.
    pub(crate) fields: Map<String, Value>,
    /// What `*` in the lists below stands for: in a name or a field, and in a variant.
    stars: Vec<[String; 2]>,
    /// Ratios of medians: name, field of the rounds, variants above and below.
    ratios: Vec<[String; 4]>,
    /// What such ratios lack to 1.
    losses: Vec<[String; 4]>,
    /// Ratios of medians without a range: name, variant and field above, variant and field below.
    quotients: Vec<[String; 5]>,
    /// Medians: name, field of the rounds, variant, factor.
    figures: Vec<(String, String, String, f64)>,
    /// Medians of every variant that begins with a prefix: prefix, name with `{variant}` (without the prefix) and
    /// `{field}`, fields of the rounds. A figure that no round has is left out.
    each: Vec<(String, String, Vec<String>)>,
    /// The bounds that figures should keep: field, `at_most` or `at_least`, bound.
    targets: Vec<(String, String, f64)>,
}

/// The list of experiments.
pub(crate) static QUESTIONS: LazyLock<Vec<Question>> =
    LazyLock::new(|| serde_json::from_str(include_str!("experiments.json")).expect("a test parses the file"));

impl Question {
    /// The experiment of that name.
    pub(crate) fn named(name: &str) -> Result<&'static Question> {
        let found = QUESTIONS.iter().find(|one| one.name == name);
        found.with_context(|| format!("no experiment is called `{name}`; `--list` names them"))
    }

    /// Inserts the ratios and figures of the list.
    pub(crate) fn put_figures(&self, all: &Rounds, answer: &mut Map<String, Value>) {
        for [in_names, in_variants] in &self.stars {
            let named = |text: &str| text.replace('*', in_names);
            let variant = |text: &str| text.replace('*', in_variants);
            for [name, field, top, bottom] in &self.ratios {
                all.put(answer, &named(name), &named(field), &variant(top), &variant(bottom));
            }
            for [name, field, top, bottom] in &self.losses {
                let ratio = all.ratio(&named(field), &variant(top), &variant(bottom));
                let lost = ratio.map(|[median, low, high]| [1.0 - median, 1.0 - high, 1.0 - low]);
                put_range(answer, &named(name), lost);
            }
            for [name, top, top_field, bottom, bottom_field] in &self.quotients {
                let medians = all.median(&variant(top), top_field).zip(all.median(&variant(bottom), bottom_field));
                answer.insert(named(name), json!(medians.and_then(|(top, bottom)| ratio(top, bottom))));
            }
        }
        for (name, field, variant, factor) in &self.figures {
            answer.insert(name.clone(), json!(all.median(variant, field).map(|figure| figure * factor)));
        }
        for (prefix, name, fields) in &self.each {
            for (variant, _) in &all.variants {
                let Some(rest) = variant.strip_prefix(prefix) else { continue };
                let name = name.replace("{variant}", rest);
                let figure =
                    |field: &String| Some((name.replace("{field}", field), json!(all.median(variant, field)?)));
                answer.extend(fields.iter().filter_map(figure));
            }
        }
    }

    /// Inserts into `targets`: each bound, its figure, and whether it is met; null without a figure.
    pub(crate) fn put_targets(&self, answer: &mut Map<String, Value>) {
        for (field, word, bound) in &self.targets {
            let is = answer.get(field).and_then(Value::as_f64);
            let met = is.map(|is| if word == "at_most" { is <= *bound } else { is >= *bound });
            let target = &mut answer.entry("targets").or_insert(Value::Null)[field];
            (target[word], target["is"], target["met"]) = (json!(bound), json!(is), json!(met));
        }
    }
}

/// The settings and directories of an experiment.
pub(crate) struct Context<'a> {
    /// Its name, for its child processes.
    pub(crate) name: &'a str,
    /// Whether less data and shorter rounds are wanted.
    pub(crate) quick: bool,
    /// Where its databases go.
    pub(crate) scratch: &'a Path,
    /// A directory in memory.
    pub(crate) memory_dir: &'a Path,
    /// The directory of HTML pages, if one was given.
    pub(crate) pages: Option<&'a Path>,
}

impl Context<'_> {
    /// One of two sizes.
    pub(crate) fn size<T>(&self, quick: T, full: T) -> T {
        if self.quick { quick } else { full }
    }

    /// Has a child process carry out `task` and returns its answer.
    pub(crate) fn child(&self, task: &Value) -> Result<Map<String, Value>> {
        Ok(object(ask(&["experiment", self.name, "--variant", &task.to_string()], false, LIMIT)?))
    }

    /// Carries out every variant, its name and its task, once in each round, in turns.
    pub(crate) fn interleave(&self, variants: &[(String, Value)], rounds: u32) -> Result<Rounds> {
        let mut answers = Rounds::default();
        for round in 1..=rounds {
            for (name, task) in variants {
                let answer = self.child(task).with_context(|| name.clone())?;
                eprintln!("{name} round {round} of {rounds}: {}", Value::Object(answer.clone()));
                answers.add(name, answer);
            }
        }
        Ok(answers)
    }
}

/// The answers of all variants by name, one for each round.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rounds {
    variants: Vec<(String, Vec<Map<String, Value>>)>,
    /// Further names of variants, which the lists of a question may use.
    aliases: HashMap<String, String>,
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

    /// Gives a variant one more name.
    pub(crate) fn alias(&mut self, alias: String, variant: String) {
        self.aliases.insert(alias, variant);
    }

    fn numbers(&self, variant: &str, field: &str) -> Vec<Option<f64>> {
        let variant = self.aliases.get(variant).map_or(variant, String::as_str);
        let rounds = self.variants.iter().find(|(name, _)| name == variant).map_or(&[][..], |(_, rounds)| rounds);
        rounds.iter().map(|round| round.get(field)?.as_f64().filter(|number| number.is_finite())).collect()
    }

    /// The median of a field of a variant; `None` if no round has it.
    pub(crate) fn median(&self, variant: &str, field: &str) -> Option<f64> {
        median(self.numbers(variant, field).into_iter().flatten().collect())
    }

    /// The ratio of medians of variant `top` to variant `bottom`, with the least and largest ratio within one round.
    pub(crate) fn ratio(&self, field: &str, top: &str, bottom: &str) -> Option<[f64; 3]> {
        let median = ratio(self.median(top, field)?, self.median(bottom, field)?)?;
        let pairs = self.numbers(top, field).into_iter().zip(self.numbers(bottom, field));
        let singles: Vec<f64> = pairs.filter_map(|(one, other)| ratio(one?, other?)).collect();
        let low = singles.iter().copied().reduce(f64::min).unwrap_or(median);
        Some([median, low, singles.into_iter().reduce(f64::max).unwrap_or(median)])
    }

    /// Inserts a ratio and its range into an answer; null for both if there is none.
    pub(crate) fn put(&self, answer: &mut Map<String, Value>, name: &str, field: &str, top: &str, bottom: &str) {
        put_range(answer, name, self.ratio(field, top, bottom));
    }

    /// Every round of every variant.
    pub(crate) fn json(&self) -> Value {
        self.variants.iter().map(|(name, rounds)| (name.clone(), json!(rounds))).collect::<Map<_, _>>().into()
    }
}

/// Inserts a number and its range.
fn put_range(answer: &mut Map<String, Value>, name: &str, number: Option<[f64; 3]>) {
    answer.insert(name.to_owned(), json!(number.map(|[median, ..]| median)));
    answer.entry("ranges").or_insert(Value::Null)[name] = json!(number.map(|[_, low, high]| [low, high]));
}

#[cfg(test)]
mod tests {
    use super::{Question, Rounds};
    use crate::engine::object;
    use serde_json::{Map, Value, json};

    fn rounds(variants: &[(&str, &[Value])]) -> Rounds {
        let mut all = Rounds::default();
        for (name, values) in variants {
            values.iter().for_each(|value| all.add(name, object(json!({"ns": value}))));
        }
        all
    }

    #[test]
    fn ratios_are_of_medians_and_ranges_of_rounds() {
        let all = rounds(&[("a", &[json!(10), json!(40), json!(30)]), ("b", &[json!(20.0), json!(20), json!(10)])]);
        assert_eq!(all.ratio("ns", "a", "b"), Some([1.5, 0.5, 3.0]));
        assert_eq!(all.median("a", "ns"), Some(30.0));
    }

    #[test]
    fn missing_or_zero_makes_no_ratio() {
        let all = rounds(&[
            ("good", &[json!(10), json!(10)]),
            ("zero", &[json!(0), json!(0)]),
            ("null", &[json!(null), json!("ten")]),
            ("half", &[json!(null), json!(20)]),
        ]);
        for (top, bottom) in [("good", "zero"), ("zero", "good"), ("null", "good"), ("good", "absent")] {
            assert_eq!(all.ratio("ns", top, bottom), None, "{top} {bottom}");
        }
        let mut answer = Map::new();
        all.put(&mut answer, "some", "ns", "half", "good");
        all.put(&mut answer, "none", "ns", "good", "zero");
        assert_eq!(json!(answer), json!({"some": 2.0, "none": null, "ranges": {"some": [2.0, 2.0], "none": null}}));
        let list = json!({
            "name": "", "about": "", "targets": [["some", "at_least", 1.5], ["none", "at_most", 1.0]],
        });
        serde_json::from_value::<Question>(list).unwrap().put_targets(&mut answer);
        assert_eq!(answer["targets"]["some"], json!({"at_least": 1.5, "is": 2.0, "met": true}));
        assert_eq!(answer["targets"]["none"]["met"], Value::Null);
    }

    #[test]
    fn every_round_is_in_the_answer() {
        let mut all = rounds(&[("a", &[json!(1), json!(2)])]);
        all.extend(rounds(&[("b", &[json!(3)]), ("a", &[json!(4)])]));
        assert_eq!(all.json(), json!({"a": [{"ns": 1}, {"ns": 2}, {"ns": 4}], "b": [{"ns": 3}]}));
    }
}
