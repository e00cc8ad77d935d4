//! `azekura`: inspects, fills, verifies and compacts azekura databases from the command line.
//!
//! Reading order: `args` (commands and options; `partition_options` and `size`: those of new partitions;
//! `backup_args`), `command` (one file per family of commands; `demo` has a folder), `open` (databases and partitions),
//! `output`, `display` and `progress` (what is printed), `encoding` and `path_key` (bytes as text and as paths),
//! `error` (error messages and exit codes), `interrupt` (Ctrl-C), `temporary_directory`.

mod args;
#[cfg(feature = "backup")]
mod backup_args;
mod command;
mod display;
mod encoding;
mod error;
mod interrupt;
mod open;
mod output;
mod partition_options;
mod path_key;
mod progress;
mod size;
mod temporary_directory;

use std::path::Path;
use std::process::ExitCode;

use clap::Parser;

use crate::args::{Cli, Command, DEFAULT_PATH, EXIT_CODES};
#[cfg(feature = "backup")]
use crate::command::backup;
use crate::command::{
    demo, gc, generate, maintenance, partitions, point, range, repair, shell, stats, transfer, verify,
};
use crate::error::{CommandOutcome, Result};
use crate::output::CommandOutput;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return error::report_usage(&error),
    };
    let mut output = CommandOutput::new(cli.json);
    let db = cli.db.as_deref();
    match run(cli.command, db, &mut output).and_then(|outcome| output.finish().map(|()| outcome)) {
        Ok(outcome) => outcome.exit_code(),
        Err(error) => error.report(output.json()),
    }
}

fn run(command: Command, db: Option<&Path>, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let demo_db = db;
    let from_environment = std::env::var_os("AZEKURA_DB").filter(|path| !path.is_empty());
    let default = from_environment.as_deref().map_or(Path::new(DEFAULT_PATH), Path::new);
    let db = db.unwrap_or(default);
    match command {
        Command::Demo(args) => demo::run(&args, demo_db, output),
        Command::DemoWriter(args) => demo::run_writer(&args, db),
        Command::Put(args) => point::put(&args, db, output),
        Command::Merge(args) => point::merge(&args, db, output),
        Command::Get(args) => point::get(&args, db, output),
        Command::Del(args) => point::del(&args, db, output),
        Command::Clear(args) => point::clear(&args, db, output),
        Command::Scan(args) => range::scan(&args, db, output),
        Command::Count(args) => range::count(&args, db, output),
        Command::Import(args) => transfer::import(&args, db, output),
        Command::Export(args) => transfer::export(&args, db, output),
        Command::Stats(args) => stats::stats(&args, db, output),
        Command::Levels(args) => stats::levels(&args, db, output),
        Command::Blobs(args) => stats::blobs(&args, db, output),
        Command::Gc(args) => gc::run(&args, db, output),
        Command::Verify(args) => verify::verify(args, db, output),
        Command::Repair(args) => repair::repair(&args, db, output),
        Command::Compact(args) => maintenance::compact(&args, db, output),
        Command::Checkpoint(args) => maintenance::checkpoint(&args, db, output),
        #[cfg(feature = "backup")]
        Command::Backup(args) => backup::run(args, db, output),
        Command::Shell(args) => shell::run(&args, db, output),
        Command::Partitions(args) => partitions::run(&args, db, output),
        Command::Generate(args) => generate::run(&args, output),
        Command::ExitCodes => output.line(EXIT_CODES).map(|()| CommandOutcome::Success),
    }
}
