//! `generate`: man pages and shell completions, made from the definition of the command line.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use clap::{Command, CommandFactory, ValueEnum};
use clap_complete::{Shell, generate_to};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use serde_json::json;

use crate::args::{Cli, EXIT_CODES, GenerateArgs, GenerateKind};
use crate::error::{CliError, CommandOutcome, Result};
use crate::output::{self, CommandOutput};

/// Name of the man page that has the exit codes.
const EXIT_CODES_PAGE: &str = "azekura-exit-codes";

/// Writes one file to standard output, or all files below a directory.
pub(crate) fn run(args: &GenerateArgs, output: &mut CommandOutput) -> Result<CommandOutcome> {
    if let Some(dir) = &args.dir {
        let written = fs::create_dir_all(dir).and_then(|()| write_all(args.kind, dir));
        written.map_err(|e| CliError::os("write the files", dir, e))?;
        let text = format!("{} are in {}", display_name(args.kind), dir.display());
        output.json_or_text(json!({ "directory": dir.to_string_lossy() }), text)?;
        return Ok(CommandOutcome::Success);
    }
    let mut text = Vec::new();
    match args.kind {
        GenerateKind::Man => {
            let mut all = visible(&Cli::command());
            all.build();
            let mut command = &all;
            for word in &args.of {
                let found = command.get_subcommands().find(|sub| sub.get_name() == word);
                command =
                    found.ok_or_else(|| CliError::usage(format!("there is no command \"{}\"", args.of.join(" "))))?;
            }
            write_page(command, &mut text).map_err(output::write_error)?;
        }
        GenerateKind::Completions => {
            let [name] = &args.of[..] else { return Err(CliError::usage("name one shell, or give --dir")) };
            let shell =
                Shell::from_str(name, false).map_err(|_| CliError::usage(format!("there is no shell \"{name}\"")))?;
            clap_complete::generate(shell, &mut visible(&Cli::command()), "azekura", &mut text);
        }
    }
    output.write_bytes(&text)?;
    Ok(CommandOutcome::Success)
}

fn write_all(kind: GenerateKind, dir: &Path) -> io::Result<()> {
    let mut all = visible(&Cli::command());
    match kind {
        GenerateKind::Man => {
            all.build();
            write_pages(&all, dir)
        }
        GenerateKind::Completions => {
            Shell::value_variants().iter().try_for_each(|shell| generate_to(*shell, &mut all, "azekura", dir).map(drop))
        }
    }
}

fn write_pages(command: &Command, dir: &Path) -> io::Result<()> {
    let mut page = Vec::new();
    write_page(command, &mut page)?;
    fs::write(dir.join(format!("{}.1", page_name(command))), page)?;
    let subcommands = command.get_subcommands().filter(|sub| sub.get_name() != "help");
    subcommands.into_iter().try_for_each(|sub| write_pages(sub, dir))
}

fn page_name(command: &Command) -> &str {
    command.get_display_name().unwrap_or(command.get_name())
}

fn write_page(command: &Command, out: &mut Vec<u8>) -> io::Result<()> {
    let named = command.clone().disable_help_subcommand(true);
    let man = Man::new(named);
    if page_name(command) != EXIT_CODES_PAGE {
        return man.render(out);
    }
    man.render_title(out)?;
    man.render_name_section(out)?;
    write_exit_codes(out)
}

/// The exit codes as a list, whose lines a formatter may break.
fn write_exit_codes(out: &mut dyn Write) -> io::Result<()> {
    let mut page = Roff::new();
    page.control("SH", ["DESCRIPTION"]);
    for paragraph in EXIT_CODES.split("\n\n").skip(1) {
        if !paragraph.starts_with(' ') {
            let (text, example) = paragraph.split_once('\n').unwrap_or((paragraph, ""));
            page.control("PP", []).text([roman(text)]);
            page.control("PP", []).control("nf", []).text([roman(example.trim())]).control("fi", []);
            continue;
        }
        for line in paragraph.lines() {
            match line.trim().split_once("  ") {
                Some((code, meaning)) => page.control("TP", []).text([bold(code)]).text([roman(meaning)]),
                None => page.text([roman(line.trim())]),
            };
        }
    }
    page.to_writer(out)
}

/// The definition without hidden commands and options.
fn visible(command: &Command) -> Command {
    let mut shown =
        Command::new(command.get_name().to_string()).about(command.get_about().cloned().unwrap_or_default());
    if let Some(text) = command.get_long_about() {
        shown = shown.long_about(text.clone());
    }
    if let Some(text) = command.get_after_help() {
        shown = shown.after_help(text.clone());
    }
    if let Some(version) = command.get_version() {
        shown = shown.version(version.to_string());
    }
    shown = shown.args(command.get_arguments().filter(|arg| !arg.is_hide_set()).cloned());
    shown.subcommands(command.get_subcommands().filter(|sub| !sub.is_hide_set()).map(visible))
}

fn display_name(kind: GenerateKind) -> &'static str {
    match kind {
        GenerateKind::Man => "The man pages",
        GenerateKind::Completions => "The completions",
    }
}
