//! `azekura`: look into, fill, check and compact azekura databases from the command line.
//!
//! Reading order: `args` (what can be asked), `command` (one file per command or small family), `demo` (the main job on
//! real files, with a crash in the middle), `failure` (exit codes), `output` and `display` (what is printed).

mod args;
mod command;
mod demo;
mod display;
mod encoding;
mod failure;
mod open;
mod output;
mod path_key;
mod progress;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let cli = match args::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return failure::report_usage(&error),
    };
    let mut output = output::Output::new(cli.json);
    match command::run(cli.command, &mut output).and_then(|answer| output.finish().map(|()| answer)) {
        Ok(answer) => answer.exit_code(),
        Err(failure) => failure.report(output.json()),
    }
}
