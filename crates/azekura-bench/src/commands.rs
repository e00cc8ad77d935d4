//! The command line, and what each command measures, prints and writes.

use crate::engine::object;
use crate::error::Result;
use crate::experiment::list::functions;
use crate::experiment::rounds::{Context, QUESTIONS, Question};
use crate::measure::device::Conditions;
use crate::measure::disk;
use crate::report::{self, run_objects};
use crate::task::child;
use crate::task::comparison::{Comparison, Loaded, perform, verdict};
use anyhow::{Context as _, bail};
use clap::{Args, Parser, Subcommand};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Measures azekura, alone and beside its peers. The README of this crate says what makes a comparison fair.
#[derive(Debug, Parser)]
#[command(name = "azekura-bench", version)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run workloads on engines, interleaved, and compare them.
    Run(Run),
    /// Run a preset and write its results page, report.md, with a chart and report.json.
    Report(Report),
    /// Measure one question, variants interleaved, and answer with ratios as JSON.
    Experiment(Experiment),
    /// One task, for a parent process.
    #[command(hide = true)]
    Child {
        /// The task as JSON.
        task: String,
    },
}

/// Where a command works, and its output.
#[derive(Debug, Args)]
struct Common {
    /// Directory to work below; the run makes a directory of its own in it and removes it at the end.
    #[arg(long, default_value = "target/bench")]
    dir: PathBuf,
    /// Print one JSON object per line.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct Run {
    #[command(flatten)]
    comparison: Comparison,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Args)]
struct Report {
    /// quick (about 5 minutes) or full (about an hour).
    preset: String,
    /// Engines, separated by commas.
    #[arg(long, default_value = "all")]
    engine: String,
    /// Directory for report.md, ratios.svg and report.json.
    #[arg(long, default_value = "target/bench/report")]
    out: PathBuf,
    #[command(flatten)]
    common: Common,
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
    #[command(flatten)]
    common: Common,
}

impl Cli {
    /// Carries out the command.
    pub(crate) fn perform(self) -> Result<()> {
        match self.command {
            Command::Run(run) => run.perform(),
            Command::Report(report) => report.perform(),
            Command::Experiment(experiment) => experiment.perform(),
            Command::Child { task } => child::answer(|| perform(&serde_json::from_str(&task)?)),
        }
    }
}

impl Run {
    /// Prints medians and ratios. An error if azekura has no figures for something, or if an answer was wrong.
    fn perform(&self) -> Result<()> {
        let scratch = disk::scratch(&self.common.dir)?;
        let rows = compare(&self.comparison, scratch.path(), &mut Loaded::new())?;
        if self.common.json {
            rows.iter().for_each(|row| println!("{}", json!(row)));
        } else {
            println!("{}{}", report::table(&rows, false), json!(rows.first().map(|row| &row["conditions"])));
        }
        verdict(rounds_of(&rows))
    }
}

/// Every round of every object of a run.
fn rounds_of(rows: &[Map<String, Value>]) -> impl Iterator<Item = &Value> {
    rows.iter().filter_map(|row| row["rounds"].as_array()).flatten()
}

/// Carries out a comparison between two measurements of the machine.
fn compare(comparison: &Comparison, scratch: &Path, loaded: &mut Loaded) -> Result<Vec<Map<String, Value>>> {
    comparison.shape(&comparison.workloads[0])?;
    comparison.engines()?;
    let conditions = Conditions::begin(scratch)?;
    let rows = comparison.run(scratch, loaded)?;
    Ok(run_objects(&rows, &comparison.json()?, &conditions.finish(scratch)?))
}

impl Report {
    /// Runs a preset and writes its page.
    fn perform(&self) -> Result<()> {
        let found = report::presets()?.into_iter().find(|preset| preset.preset == self.preset);
        let mut report = found.with_context(|| format!("no preset is called `{}`", self.preset))?;
        let (scratch, mut loaded) = (disk::scratch(&self.common.dir)?, Loaded::new());
        for section in &mut report.sections {
            let line = format!("run --engine {} {} {}", self.engine, report.arguments, section.arguments);
            section.rows = compare(&parse(&line)?.comparison, scratch.path(), &mut loaded)?;
        }
        report.write(&self.out)?;
        report.sections.iter().try_for_each(|section| verdict(rounds_of(&section.rows)))
    }
}

fn parse(line: &str) -> Result<Run> {
    match Cli::try_parse_from(["azekura-bench"].into_iter().chain(line.split_whitespace()))?.command {
        Command::Run(run) => Ok(run),
        _ => bail!("`{line}` is not a run"),
    }
}

impl Experiment {
    /// Lists the experiments, or runs one, or one variant of one.
    fn perform(&self) -> Result<()> {
        let Some(name) = self.name.as_deref().filter(|_| !self.list) else {
            QUESTIONS.iter().for_each(|one| println!("{:<18} {}", one.name, one.about));
            return Ok(());
        };
        let question = Question::named(name)?;
        let (run, variant) = functions(name)?;
        if let Some(task) = &self.variant {
            return child::answer(|| Ok(Value::Object(variant(serde_json::from_str(task)?)?)));
        }
        let scratch = disk::scratch(&self.common.dir)?;
        let conditions = Conditions::begin(scratch.path())?;
        let (pages, memory_dir) = (self.pages.as_deref(), self.memory_dir.as_path());
        let context = Context { name, quick: self.quick, scratch: scratch.path(), memory_dir, pages };
        let mut answer = object(json!({
            "experiment": name, "about": question.about, "quick": self.quick, "made": report::now(),
            "version": report::version(), "baseline_vs_peer": null,
        }));
        answer.extend(question.fields.clone());
        answer.extend(run(&context)?);
        question.put_targets(&mut answer);
        answer.insert("conditions".into(), conditions.finish(scratch.path())?);
        let answer = Value::Object(answer);
        if self.common.json {
            println!("{answer}");
        } else {
            println!("{answer:#}");
        }
        Ok(())
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
                assert_eq!(run.comparison.rounds, 3, "{}", section.title);
                assert!(run.comparison.workloads.iter().all(|workload| run.comparison.shape(workload).is_ok()));
            }
        }
        assert!(parse("experiment --list").is_err());
    }
}
