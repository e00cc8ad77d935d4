//! The commands: what each measures, prints and writes.

use crate::cli::{self, Experiment, Run};
use crate::engine::api::object;
use crate::error::Result;
use crate::experiment::list::{EXPERIMENTS, Question};
use crate::experiment::rounds::Context;
use crate::measure::device::Conditions;
use crate::measure::disk::{self, Scratch};
use crate::report::chart::three_digits;
use crate::report::compare::run_objects;
use crate::report::page::{self, Report};
use crate::report::table;
use crate::task::child;
use crate::task::comparison::{Comparison, Loaded, verdict};
use crate::task::measure::harness_cost;
use crate::workload::data::SMALL_RECORDS;
use clap::Parser;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Workloads on engines, interleaved: prints medians and ratios. An error if azekura has no figures for something, or
/// if an engine gave a wrong answer.
pub(crate) fn run(run: &Run) -> Result<()> {
    let (comparison, common) = (&run.comparison, &run.common);
    let (rows, conditions, outcome) =
        compare(comparison, &common.scratch()?, common.device_seconds, &mut Loaded::default())?;
    if common.json {
        rows.into_iter().for_each(|row| println!("{}", Value::Object(row)));
    } else {
        print!("{}\n{}", table::medians(&rows, false), table::conditions(&conditions));
        println!("medians of {} interleaved rounds; {:?}", comparison.rounds, comparison.options);
    }
    outcome
}

/// The objects of a comparison, the conditions, and its verdict.
type Compared = (Vec<Map<String, Value>>, Value, Result<()>);

/// Carries out a comparison between two measurements of the machine.
fn compare(comparison: &Comparison, scratch: &Scratch, seconds: f64, loaded: &mut Loaded) -> Result<Compared> {
    let shape = comparison.shape(comparison.workloads[0])?;
    comparison.engines()?;
    let conditions = Conditions::begin(&scratch.path, harness_cost(&shape), seconds)?;
    let rows = comparison.run(scratch, loaded)?;
    let conditions = conditions.finish(&scratch.path, seconds)?;
    Ok((run_objects(&rows, &comparison.json()?, &conditions), conditions, verdict(&rows)))
}

/// Runs a preset and writes its page, or writes the page of an earlier run again.
pub(crate) fn report(asked: &cli::Report) -> Result<()> {
    let Some(mut report) = page::presets()?.into_iter().find(|preset| preset.preset == asked.what) else {
        let text = std::fs::read_to_string(&asked.what).map_err(|error| format!("{}: {error}", asked.what))?;
        return serde_json::from_str::<Report>(&text)?.write(&asked.out);
    };
    let (scratch, mut loaded, mut outcome) = (asked.common.scratch()?, Loaded::default(), Ok(()));
    (report.made, report.version) = (page::now(), page::version());
    for section in &mut report.sections {
        let line = format!("run --engine {} {} {}", asked.engine, report.arguments, section.arguments);
        let comparison = parse(&line)?.comparison;
        let (rows, _, found) = compare(&comparison, &scratch, asked.common.device_seconds, &mut loaded)?;
        (section.rows, outcome) = (rows, outcome.and(found));
    }
    report.write(&asked.out)?;
    if asked.common.json {
        println!("{}", json!(report));
    }
    outcome
}

fn parse(line: &str) -> Result<Run> {
    match cli::Cli::try_parse_from(["azekura-bench"].into_iter().chain(line.split_whitespace()))?.command {
        cli::Command::Run(run) => Ok(run),
        _ => Err(format!("`{line}` is not a run").into()),
    }
}

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
    let (scratch, seconds) = (asked.common.scratch()?, asked.common.device_seconds);
    let conditions = Conditions::begin(&scratch.path, harness_cost(&SMALL_RECORDS), seconds)?;
    let mut answer = object(json!({
        "experiment": name, "about": about, "quick": asked.quick, "made": page::now(), "version": page::version(),
    }));
    let out = asked.out.as_deref().unwrap_or(Path::new("target/bench/experiment"));
    let Experiment { quick, memory_dir, pages, .. } = asked;
    let context = Context { name, quick: *quick, scratch: &scratch, memory_dir, pages: pages.as_deref(), out };
    answer.extend(run(&context)?);
    let conditions = conditions.finish(&scratch.path, seconds)?;
    answer.entry("baseline_vs_peer").or_insert(Value::Null);
    answer.insert("conditions".into(), conditions.clone());
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
    use super::{parse, shown};
    use crate::engine::api::object;
    use crate::report::page::presets;
    use serde_json::json;

    #[test]
    fn numbers_are_shown_with_their_ranges() {
        let answer =
            json!({"throughput_ratio": 1.5, "baseline_vs_peer": null, "ranges": {"throughput_ratio": [1.25, 2.0]}});
        let text = shown(&object(answer));
        assert!(text.contains("throughput_ratio         1.50  (1.25-2.00)"), "{text}");
        assert!(text.contains("baseline_vs_peer         none"), "{text}");
    }

    #[test]
    fn every_section_of_a_preset_is_a_run() {
        for preset in presets().unwrap() {
            for section in &preset.sections {
                let run = parse(&format!("run {} {}", preset.arguments, section.arguments)).unwrap();
                assert_eq!(run.comparison.rounds, 3, "{}", section.title);
                assert!(run.comparison.workloads.iter().all(|workload| run.comparison.shape(*workload).is_ok()));
            }
        }
        assert!(parse("experiment --list").is_err());
    }
}
