//! The command `experiment`.

use crate::cli::Experiment as Asked;
use crate::experiment::experiment::Context;
use crate::experiment::registry::{EXPERIMENTS, named};
use crate::failure::{Result, Told};
use crate::machine::conditions::Conditions;
use crate::report::quantity::three_digits;
use crate::report::{clock, table, versions};
use crate::task::child::die_with_parent;
use crate::task::opening::SMALL_RECORDS;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::time::Duration;

/// Lists the experiments, or runs one, or one variant of one.
pub(crate) fn run(asked: &Asked) -> Result<()> {
    let Some(name) = asked.name.as_deref().filter(|_| !asked.list) else {
        EXPERIMENTS.iter().for_each(|one| println!("{:<18} {}", one.name(), one.about()));
        return Ok(());
    };
    let experiment = named(name)?;
    if let Some(task) = &asked.variant {
        die_with_parent()?;
        let task: Value = serde_json::from_str(task)?;
        let answer = experiment.variant(&task).inspect_err(|failure| println!("{}", json!(Told::of(failure))))?;
        println!("{}", Value::Object(answer));
        return Ok(());
    }
    let scratch = asked.common.place.scratch()?;
    let each = Duration::try_from_secs_f64(asked.common.device_seconds)?;
    let mut conditions = Conditions::begin(scratch.path(), &SMALL_RECORDS, each)?;
    let made = clock::now();
    let context = Context {
        name: experiment.name(),
        quick: asked.quick,
        scratch: &scratch,
        memory_dir: &asked.memory_dir,
        pages: asked.pages.as_deref(),
        out: asked.out.as_deref().unwrap_or(Path::new("target/bench/experiment")),
    };
    let own = experiment.run(&context)?;
    conditions.finish(scratch.path(), each)?;
    let head = json!({
        "experiment": experiment.name(), "about": experiment.about(), "quick": asked.quick, "made": made,
        "version": versions::ours(),
    });
    let answer = answer(head, own, json!(conditions));
    if asked.out.is_some() {
        context.write(&format!("{}.json", context.name), &format!("{}\n", json!(answer)))?;
    }
    if asked.common.json {
        println!("{}", Value::Object(answer));
    } else {
        print!("{}{}", shown(&answer), table::conditions(&conditions));
    }
    Ok(())
}

/// The one object: who and when, then ratios, then rounds and conditions. `baseline_vs_peer` is always there.
fn answer(head: Value, own: Map<String, Value>, conditions: Value) -> Map<String, Value> {
    let mut answer = match head {
        Value::Object(head) => head,
        _ => Map::new(),
    };
    answer.extend(own);
    answer.entry("baseline_vs_peer").or_insert(Value::Null);
    answer.insert("conditions".into(), conditions);
    answer
}

/// Every number of the answer, with its range if it has one.
fn shown(answer: &Map<String, Value>) -> String {
    let mut text = String::new();
    for (name, value) in answer {
        let said = match value {
            Value::Number(number) => number.as_f64().map_or_else(String::new, three_digits),
            Value::Null => "none".into(),
            Value::String(said) => said.clone(),
            _ => continue,
        };
        let range = answer.get("ranges").and_then(|ranges| ranges[name].as_array()).map_or_else(String::new, |range| {
            let ends: Vec<String> = range.iter().filter_map(Value::as_f64).map(three_digits).collect();
            format!("  ({})", ends.join("-"))
        });
        text.push_str(&format!("{name:<24} {said}{range}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::{answer, shown};
    use serde_json::{Value, json};

    #[test]
    fn an_answer_always_says_how_the_baseline_stands() {
        let own = json!({"throughput_ratio": 1.5, "ranges": {"throughput_ratio": [1.25, 2.0]}});
        let Value::Object(own) = own else { panic!("an object") };
        let all = answer(json!({"experiment": "some"}), own.clone(), json!({"cpus": 2}));
        assert_eq!((&all["baseline_vs_peer"], &all["conditions"]["cpus"]), (&Value::Null, &json!(2)));
        let text = shown(&all);
        assert!(text.contains("throughput_ratio         1.50  (1.25-2.00)"), "{text}");
        assert!(text.contains("baseline_vs_peer         none"), "{text}");
        let mut with = own;
        with.insert("baseline_vs_peer".into(), json!(0.5));
        assert_eq!(answer(json!({}), with, json!({}))["baseline_vs_peer"], 0.5);
    }
}
