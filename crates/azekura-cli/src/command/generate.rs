//! `generate`: man pages and shell completions, made from the definition of the command line.

use std::fs;

use clap::CommandFactory;
use clap_complete::{Shell, generate_to};
use serde_json::json;

use crate::args::{Cli, GenerateArgs, GenerateKind};
use crate::error::{CliError, CommandOutcome, Result};
use crate::output::CommandOutput;

/// Shells for which a completion file is written.
const SHELLS: [Shell; 5] = [Shell::Bash, Shell::Elvish, Shell::Fish, Shell::PowerShell, Shell::Zsh];

/// Writes the files below the given directory, which is created if it is missing.
pub(crate) fn run(args: &GenerateArgs, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let dir = &args.dir;
    fs::create_dir_all(dir).map_err(|e| CliError::os("create the directory", dir, e))?;
    let written = match args.kind {
        GenerateKind::Man => clap_mangen::generate_to(Cli::command(), dir),
        GenerateKind::Completions => {
            SHELLS.iter().try_for_each(|shell| generate_to(*shell, &mut Cli::command(), "azekura", dir).map(drop))
        }
    };
    written.map_err(|e| CliError::os("write the files", dir, e))?;
    let text = format!("{} are in {}", display_name(args.kind), dir.display());
    output.json_or_text(json!({ "directory": dir.to_string_lossy() }), text)?;
    Ok(CommandOutcome::Success)
}

fn display_name(kind: GenerateKind) -> &'static str {
    match kind {
        GenerateKind::Man => "The man pages",
        GenerateKind::Completions => "The completions",
    }
}
