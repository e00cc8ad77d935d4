//! `experiment`: one question, its variants interleaved, answered by ratios.

use crate::cli::Experiment;
use crate::engine::api::object;
use crate::error::Result;
use crate::experiment::list::{EXPERIMENTS, Question};
use crate::experiment::rounds::Context;
use crate::measure::device::Conditions;
use crate::measure::disk;
use crate::report::chart::three_digits;
use crate::report::document::{now, own_version};
use crate::report::table;
use crate::task::child;
use crate::task::measure::harness_cost;
use crate::workload::data::SMALL_RECORDS;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Lists the experiments, or runs one, or one variant of one.
pub(crate) fn experiment(asked: &Experiment) -> Result<()> {
    let Some(name) = asked.name.as_deref().filter(|_| !asked.list) else {
        EXPERIMENTS.iter().for_each(|one| println!("{:<18} {}", one.name, one.about));
        return Ok(());
    };
    let known = || EXPERIMENTS.iter().map(|one| one.name).collect::<Vec<_>>().join(", ");
    let found = EXPERIMENTS.iter().find(|one| one.name == name);
    let Question { about, run, variant, .. } =
        found.ok_or_else(|| format!("no experiment is called `{name}`; there are {}", known()))?;
    if let Some(task) = &asked.variant {
        return child::answer(|| Ok(Value::Object(variant(serde_json::from_str(task)?)?)));
    }
    let (scratch, seconds) = (asked.common.place.scratch()?, asked.common.device_seconds);
    let mut conditions = Conditions::begin(&scratch.path, harness_cost(&SMALL_RECORDS), seconds)?;
    let (made, version) = (now(), own_version());
    let out = asked.out.as_deref().unwrap_or(Path::new("target/bench/experiment"));
    let Experiment { quick, memory_dir, pages, .. } = asked;
    let context = Context { name, quick: *quick, scratch: &scratch, memory_dir, pages: pages.as_deref(), out };
    let own = run(&context)?;
    conditions.finish(&scratch.path, seconds)?;
    let head = json!({"experiment": name, "about": about, "quick": quick, "made": made, "version": version});
    let mut answer = object(head);
    answer.extend(own);
    answer.entry("baseline_vs_peer").or_insert(Value::Null);
    answer.insert("conditions".into(), json!(conditions));
    if asked.out.is_some() {
        disk::write(out, &format!("{name}.json"), &format!("{}\n", json!(answer)))?;
    }
    if asked.common.json {
        println!("{}", Value::Object(answer));
    } else {
        print!("{}{}", shown(&answer), table::conditions(&conditions));
    }
    Ok(())
}

/// Every number of the answer, with its range if it has one.
fn shown(answer: &Map<String, Value>) -> String {
    let mut text = String::new();
    for (name, value) in answer {
        let words = match value {
            Value::Number(number) => number.as_f64().map_or_else(String::new, three_digits),
            Value::Null => "none".into(),
            Value::String(words) => words.clone(),
            _ => continue,
        };
        let range = answer.get("ranges").and_then(|ranges| ranges[name].as_array()).map_or_else(String::new, |range| {
            let ends: Vec<String> = range.iter().filter_map(Value::as_f64).map(three_digits).collect();
            format!("  ({})", ends.join("-"))
        });
        text.push_str(&format!("{name:<24} {words}{range}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::shown;
    use crate::engine::api::object;
    use serde_json::json;

    #[test]
    fn numbers_are_shown_with_their_ranges() {
        let answer =
            json!({"throughput_ratio": 1.5, "baseline_vs_peer": null, "ranges": {"throughput_ratio": [1.25, 2.0]}});
        let text = shown(&object(answer));
        assert!(text.contains("throughput_ratio         1.50  (1.25-2.00)"), "{text}");
        assert!(text.contains("baseline_vs_peer         none"), "{text}");
    }
}
