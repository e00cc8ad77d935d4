//! The trait every experiment answers, and what it is given.

use crate::failure::{Result, Told};
use crate::machine::disk::Scratch;
use crate::task::child;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// So long one variant of one round may take.
const LIMIT: Duration = Duration::from_secs(600);

/// One question.
pub(crate) trait Experiment: std::marker::Sync {
    /// Its name on the command line.
    fn name(&self) -> &'static str;

    /// What is asked, in a sentence.
    fn about(&self) -> &'static str;

    /// Answers it: in the parent process, which opens no database.
    fn run(&self, context: &Context<'_>) -> Result<Map<String, Value>>;

    /// Does one variant once: in a child process.
    fn variant(&self, task: &Value) -> Result<Map<String, Value>>;
}

/// What an experiment may use.
pub(crate) struct Context<'a> {
    /// Its name, for its children.
    pub(crate) name: &'static str,
    /// Whether less data and shorter rounds are wanted.
    pub(crate) quick: bool,
    /// Where its databases go.
    pub(crate) scratch: &'a Scratch,
    /// A directory in memory.
    pub(crate) memory_dir: &'a Path,
    /// The directory that HTML pages shall be taken from, if one was named.
    pub(crate) pages: Option<&'a Path>,
    /// Where files go that are more than an answer: series, charts.
    pub(crate) out: &'a Path,
}

impl Context<'_> {
    /// One of two numbers.
    pub(crate) fn size<T>(&self, quick: T, full: T) -> T {
        if self.quick { quick } else { full }
    }

    /// A directory that does not exist yet.
    pub(crate) fn fresh(&self, name: &str) -> Result<PathBuf> {
        self.scratch.fresh(name)
    }

    /// A directory of this run's own in memory; gone with what is given.
    pub(crate) fn memory(&self) -> Result<Scratch> {
        Scratch::create(self.memory_dir, self.scratch.keeps())
    }

    /// Writes a file that stays.
    pub(crate) fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.out.join(name);
        std::fs::create_dir_all(self.out).map_err(|error| format!("cannot create {}: {error}", self.out.display()))?;
        std::fs::write(&path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        eprintln!("wrote {}", path.display());
        Ok(())
    }

    /// Does `task` in a child process and gives its answer.
    pub(crate) fn child(&self, task: &Value) -> Result<Map<String, Value>> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["experiment", self.name, "--variant"]).arg(task.to_string());
        let ended = child::run(command, LIMIT)?;
        let said: Value = ended.text.lines().last().map(serde_json::from_str).transpose()?.unwrap_or_default();
        match said {
            Value::Object(answer) if ended.status.success() => Ok(answer),
            said => match serde_json::from_value::<Told>(said) {
                Ok(told) => Err(Box::new(told)),
                Err(_) => Err(format!("a variant of {} ended with {}", self.name, ended.status).into()),
            },
        }
    }
}
