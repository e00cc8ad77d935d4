//! From what was asked to the command that does it.

use crate::args::Command;
use crate::command::{blobs, gc, look, partitions, point, range, transfer, upkeep, verify};
use crate::demo;
use crate::failure::{Answer, EXIT_CODES, Result};
use crate::output::Output;

/// Does what was asked for.
pub(crate) fn run(command: Command, output: &mut Output) -> Result<Answer> {
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
        Command::Stats(args) => look::stats(&args, output),
        Command::Levels(args) => look::levels(&args, output),
        Command::Blobs(args) => blobs::blobs(&args, output),
        Command::Gc(args) => gc::run(&args, output),
        Command::Verify(args) => verify::verify(&args.path, output),
        Command::Compact(args) => upkeep::compact(&args, output),
        Command::Checkpoint(args) => upkeep::checkpoint(&args, output),
        Command::Partitions(args) => partitions::run(&args, output),
        Command::ExitCodes => output.line(EXIT_CODES).map(|()| Answer::Yes),
    }
}
