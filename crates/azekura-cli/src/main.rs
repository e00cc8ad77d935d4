//! `azekura`: inspects, fills, verifies and compacts azekura databases from the command line.
//!
//! Reading order: `args` (commands and options), `command` (one file per family of commands; `demo` has a folder),
//! `open` (databases and partitions), `output`, `display` and `progress` (what is printed), `encoding` and `path_key`
//! (bytes as text and as paths), `error` (error messages and exit codes).

mod args;
mod command;
mod display;
mod encoding;
mod error;
mod open;
mod output;
mod path_key;
mod progress;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Cli, Command, EXIT_CODES};
use crate::command::{demo, gc, maintenance, partitions, point, range, stats, transfer, verify};
use crate::error::{CommandOutcome, Result};
use crate::output::CommandOutput;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return error::report_usage(&error),
    };
    let mut output = CommandOutput::new(cli.json);
    match run(cli.command, &mut output).and_then(|outcome| output.finish().map(|()| outcome)) {
        Ok(outcome) => outcome.exit_code(),
        Err(error) => error.report(output.json()),
    }
}

fn run(command: Command, output: &mut CommandOutput) -> Result<CommandOutcome> {
    match command {
        Command::Demo(args) => demo::run(&args, output),
        Command::DemoWriter(args) => demo::run_writer(&args),
        Command::Put(args) => point::put(&args, output),
        Command::Get(args) => point::get(&args, output),
        Command::Del(args) => point::del(&args, output),
        Command::Scan(args) => range::scan(&args, output),
        Command::Count(args) => range::count(&args, output),
        Command::Import(args) => transfer::import(&args, output),
        Command::Export(args) => transfer::export(&args, output),
        Command::Stats(args) => stats::stats(&args, output),
        Command::Levels(args) => stats::levels(&args, output),
        Command::Blobs(args) => stats::blobs(&args, output),
        Command::Gc(args) => gc::run(&args, output),
        Command::Verify(args) => verify::verify(&args.path, output),
        Command::Compact(args) => maintenance::compact(&args, output),
        Command::Checkpoint(args) => maintenance::checkpoint(&args, output),
        Command::Partitions(args) => partitions::run(&args, output),
        Command::ExitCodes => output.line(EXIT_CODES).map(|()| CommandOutcome::Success),
    }
}
