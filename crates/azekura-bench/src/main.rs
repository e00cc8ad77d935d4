//! `azekura-bench`: workloads that measure azekura, alone and beside its peers. The README says what makes them fair.
//!
//! Reading order: [`cli`] what can be asked; [`task`] parent and child processes; [`workload`] what is done; [`engine`]
//! to whom; [`machine`] what is measured; [`report`] how it is told; [`experiment`] questions with variants; [`leaf`]
//! the leaves that one of them compares with.

// A bench measures the machine itself: files, clocks and threads are its subject, not an environment to be simulated.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod bytes;
mod cli;
mod engine;
mod experiment;
mod failure;
mod leaf;
mod machine;
mod report;
mod task;
mod workload;

use clap::Parser;
use cli::{Cli, Command, Common, Open, Partitions, Report, Run};
use failure::{Result, Told};
use machine::conditions::Conditions;
use machine::disk::Scratch;
use report::document::Document;
use report::{preset, produce, summary, table};
use serde_json::{Value, json};
use std::process::ExitCode;
use std::time::Duration;
use task::child::die_with_parent;
use task::opening::SMALL_RECORDS;
use task::rounds;
use task::task::{Job, Task};
use workload::Shape;

/// With memtables as small as the tables of `open`, Fjall 3.1.13 comes to a standstill: writer and workers both sleep.
const MEMTABLE_PER_TABLE: u64 = 64;

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Run(run) => compare(&run),
        Command::Open(open) => time_opening(&open),
        Command::Partitions(partitions) => time_partitions(&partitions),
        Command::Device(common) => show_device(&common),
        Command::Report(report) => make_report(&report),
        Command::Experiment(asked) => experiment::run::run(&asked),
        Command::Child { task } => child(&task),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("azekura-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn child(task: &str) -> Result<()> {
    die_with_parent()?;
    let task: Task = serde_json::from_str(task)?;
    let answer = task.here().inspect_err(|failure| println!("{}", json!(Told::of(failure))))?;
    println!("{answer}");
    Ok(())
}

fn begin(common: &Common, shape: &Shape) -> Result<(Scratch, Conditions, Duration)> {
    let scratch = common.place.scratch()?;
    let each = Duration::try_from_secs_f64(common.device_seconds)?;
    let conditions = Conditions::begin(scratch.path(), shape, each)?;
    Ok((scratch, conditions, each))
}

fn compare(run: &Run) -> Result<()> {
    let comparison = run.comparison()?;
    let (scratch, mut conditions, each) = begin(&run.common, &comparison.first_shape())?;
    let measurements = comparison.run(&scratch)?;
    conditions.finish(scratch.path(), each)?;
    let summaries = summary::summarise(&measurements);
    if run.common.json {
        let settings = comparison.settings();
        for summary in &summaries {
            println!("{}", summary.json(&conditions, &settings));
        }
    } else {
        let options = &comparison.options;
        print!("{}\n{}", table::medians(&summaries), table::conditions(&conditions));
        println!("medians of {} interleaved rounds; {options:?}", comparison.rounds);
    }
    rounds::verdict(&measurements)
}

fn time_opening(open: &Open) -> Result<()> {
    open.engines.check()?;
    let (scratch, conditions, each) = begin(&open.common, &SMALL_RECORDS)?;
    let memtable = bytes::Bytes(open.table_size.0.saturating_mul(MEMTABLE_PER_TABLE));
    let options = open.engines.options(memtable, Some(open.table_size));
    let (first, then) = (Job::BuildTables(open.tables), Job::OpenTables);
    let answers = rounds::opening(&scratch, &open.engines, &options, (&first, &then), false)?;
    show_openings(&answers, "open", conditions, &scratch, each, open.common.json)
}

fn time_partitions(partitions: &Partitions) -> Result<()> {
    partitions.engines.check()?;
    let (scratch, conditions, each) = begin(&partitions.common, &SMALL_RECORDS)?;
    let options = partitions.engines.options(bytes::Bytes(64 << 20), None);
    let (first, then) = (Job::CreatePartitions(partitions.count), Job::OpenPartitions(partitions.count));
    let answers = rounds::opening(&scratch, &partitions.engines, &options, (&first, &then), true)?;
    show_openings(&answers, "partitions", conditions, &scratch, each, partitions.common.json)
}

fn show_openings(
    answers: &[(String, Value)],
    workload: &str,
    mut conditions: Conditions,
    scratch: &Scratch,
    each: Duration,
    as_json: bool,
) -> Result<()> {
    conditions.finish(scratch.path(), each)?;
    if !as_json {
        print!("{}\n{}", table::openings(answers), table::conditions(&conditions));
        return Ok(());
    }
    for (engine, answer) in answers {
        let mut object = json!({"engine": engine, "workload": workload});
        if let (Value::Object(object), Value::Object(answer)) = (&mut object, answer) {
            object.extend(answer.clone());
            object.insert("conditions".into(), json!(conditions));
        }
        println!("{object}");
    }
    Ok(())
}

fn make_report(report: &Report) -> Result<()> {
    let (document, outcome) = match (report.what.as_str(), &report.file) {
        ("render", Some(file)) => (Document::read(file)?, Ok(())),
        ("render", None) => return Err("render needs the report.json of an earlier run".into()),
        (name, None) => produce::produce(preset::named(name)?, &report.engine, &report.place)?,
        (name, Some(_)) => return Err(format!("{name} takes no file; only render does").into()),
    };
    produce::write(&document, &report.target())?;
    if report.json {
        print!("{}", document.text()?);
    }
    outcome
}

fn show_device(common: &Common) -> Result<()> {
    let (_scratch, conditions, _) = begin(common, &SMALL_RECORDS)?;
    if common.json {
        println!("{}", json!(conditions));
    } else {
        print!("{}", table::conditions(&conditions));
    }
    Ok(())
}
