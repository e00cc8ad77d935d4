//! The command line, and what each command measures, prints and writes.

use crate::engine::object;
use crate::error::Result;
use crate::experiment::list::functions;
use crate::experiment::rounds::{Context, QUESTIONS, Question};
use crate::measure::device::with_conditions;
use crate::measure::disk;
use crate::report::{self, run_objects};
use crate::task::comparison::{Comparison, Databases, verdict};
use crate::task::{child, measure};
use anyhow::bail;
use clap::{Args, Parser, Subcommand};
use serde_json::{Map, Value, json};
use std::path::PathBuf;

/// Measures azekura, alone and compared with its peers. The README of this crate says what makes a comparison fair.
#[derive(Debug, Parser)]
#[command(name = "azekura-bench", version)]
pub(crate) struct Cli {
    /// Directory to work below; the run makes a directory of its own in it and removes it at the end.
    #[arg(long, global = true, default_value = "target/bench")]
    dir: PathBuf,
    /// Print one JSON object per line.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run workloads on engines, interleaved, and compare them.
    Run(Comparison),
    /// Run a preset and write its results page, report.md, with a chart and report.json.
    Report {
        /// quick (about 5 minutes) or full (about an hour).
        preset: String,
        /// Engines, separated by commas.
        #[arg(long, default_value = "all")]
        engine: String,
        /// Directory for report.md, ratios.svg and report.json.
        #[arg(long, default_value = "target/bench/report")]
        out: PathBuf,
    },
    /// Measure one question, variants interleaved, and answer with ratios as JSON.
    Experiment(Experiment),
    /// One task, for a parent process.
    #[command(hide = true)]
    Child {
        /// The task as JSON.
        task: String,
    },
}

#[derive(Debug, Args)]
struct Experiment {
    /// Which one.
    #[arg(required_unless_present = "list")]
    name: Option<String>,
    /// List all experiments.
    #[arg(long)]
    list: bool,
    /// Less data and shorter rounds.
    #[arg(long)]
    quick: bool,
    /// One variant, for a parent process.
    #[arg(long, hide = true)]
    variant: Option<String>,
    /// Directory of HTML pages, for experiments that store pages; the Rust toolchain's documentation by default, or
    /// generated pages where there is none.
    #[arg(long)]
    pages: Option<PathBuf>,
    /// Directory in memory, for experiments that need one.
    #[arg(long, default_value = "/dev/shm")]
    memory_dir: PathBuf,
}

impl Cli {
    /// Carries out the command.
    pub(crate) fn perform(self) -> Result<()> {
        match &self.command {
            Command::Run(comparison) => self.run(comparison),
            Command::Report { preset, engine, out } => {
                let mut report = report::preset(preset)?;
                let mut databases = Databases::new(&self.dir)?;
                for section in &mut report.sections {
                    let line = format!("run --engine {engine} {} {}", report.arguments, section.arguments);
                    section.rows = compare(&parse(&line)?, &mut databases)?;
                }
                report.write(out)?;
                report.sections.iter().try_for_each(|section| verdict(rounds_of(&section.rows)))
            }
            Command::Experiment(experiment) => self.experiment(experiment),
            Command::Child { task } => child::answer(|| measure::perform(&serde_json::from_str(task)?)),
        }
    }

    /// Prints medians and ratios. An error if azekura has no figures for something, or if an answer was wrong.
    fn run(&self, comparison: &Comparison) -> Result<()> {
        let rows = compare(comparison, &mut Databases::new(&self.dir)?)?;
        if self.json {
            rows.iter().for_each(|row| println!("{}", json!(row)));
        } else {
            println!("{}{}", report::table(&rows, false), json!(rows.first().map(|row| &row["conditions"])));
        }
        verdict(rounds_of(&rows))
    }

    /// Lists the experiments, or runs one, or one variant of one.
    fn experiment(&self, experiment: &Experiment) -> Result<()> {
        let Experiment { quick, variant: task, pages, memory_dir, .. } = experiment;
        let Some(name) = experiment.name.as_deref().filter(|_| !experiment.list) else {
            QUESTIONS.iter().for_each(|one| println!("{:<18} {}", one.name, one.about));
            return Ok(());
        };
        let question = Question::named(name)?;
        let (run, variant) = functions(name)?;
        if let Some(task) = task {
            return child::answer(|| Ok(Value::Object(variant(serde_json::from_str(task)?)?)));
        }
        let scratch = disk::scratch(&self.dir)?;
        let context = Context { name, quick: *quick, scratch: scratch.path(), memory_dir, pages: pages.as_deref() };
        let mut answer = object(json!({
            "experiment": name, "about": question.about, "quick": quick, "made": report::now(),
            "version": report::VERSION, "baseline_vs_peer": null,
        }));
        answer.extend(question.fields.clone());
        let (figures, conditions) = with_conditions(scratch.path(), || run(&context))?;
        answer.extend(figures);
        question.put_targets(&mut answer);
        answer.insert("conditions".into(), conditions);
        let answer = Value::Object(answer);
        println!("{}", if self.json { answer.to_string() } else { format!("{answer:#}") });
        Ok(())
    }
}

/// Every round of every object of a run.
fn rounds_of(rows: &[Map<String, Value>]) -> impl Iterator<Item = &Value> {
    rows.iter().filter_map(|row| row["rounds"].as_array()).flatten()
}

/// Carries out a comparison between two measurements of the machine.
fn compare(comparison: &Comparison, databases: &mut Databases) -> Result<Vec<Map<String, Value>>> {
    comparison.check()?;
    let dir = databases.scratch.path().to_owned();
    let (cases, conditions) = with_conditions(&dir, || comparison.run(databases))?;
    Ok(run_objects(&cases, &comparison.json()?, &conditions))
}

/// Reads the command line of a run.
fn parse(line: &str) -> Result<Comparison> {
    match Cli::try_parse_from(["azekura-bench"].into_iter().chain(line.split_whitespace()))?.command {
        Command::Run(comparison) => Ok(comparison),
        _ => bail!("`{line}` is not a run"),
    }
}

#[cfg(test)]
mod tests {
    use super::{Cli, QUESTIONS, functions, parse};
    use crate::report::presets;
    use clap::{CommandFactory, Parser};

    #[test]
    fn command_line_is_well_formed() {
        Cli::command().debug_assert();
        for line in ["run --workload nothing", "run", "run --workload overwrite --n 0", "report"] {
            assert!(Cli::try_parse_from(["azekura-bench"].into_iter().chain(line.split(' '))).is_err(), "{line}");
        }
    }

    #[test]
    fn every_experiment_of_the_list_has_functions() {
        assert_eq!(QUESTIONS.len(), 6);
        assert!(QUESTIONS.iter().all(|question| functions(&question.name).is_ok()));
    }

    #[test]
    fn every_section_of_a_preset_is_a_run() {
        for preset in presets().unwrap() {
            for section in &preset.sections {
                let run = parse(&format!("run {} {}", preset.arguments, section.arguments)).unwrap();
                assert!(run.rounds >= 2, "{}: a range needs two rounds", section.title);
                assert!(run.workloads.iter().all(|workload| run.shape(workload).is_ok()));
            }
        }
        assert!(parse("experiment --list").is_err());
    }
}
