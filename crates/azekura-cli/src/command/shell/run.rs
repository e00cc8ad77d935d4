//! The loops of the shell: over lines of a script, and over lines that are typed.

use std::io::{self, BufRead, IsTerminal};
use std::path::Path;

use super::editor::{LineEditor, TypedLine};
use super::session::{ShellFlow, ShellSession};
use crate::args::ShellArgs;
use crate::display::plural;
use crate::error::{CliError, CommandOutcome, Result, print_error};
use crate::interrupt;
use crate::output::CommandOutput;

/// Reads and carries out commands until the end of standard input. At a terminal the user edits lines, and an error
/// does not end the shell.
pub(crate) fn run(args: &ShellArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let mut session = ShellSession::open(args, db, output.json())?;
    let done = if io::stdin().is_terminal() {
        run_interactive(&mut session, db, output)
    } else {
        run_script(&mut session, io::stdin().lock(), output)
    };
    let closed = session.close();
    done.and(closed).map(|()| CommandOutcome::Success)
}

/// Ends at the first command that fails. Its error has the number of the line.
fn run_script(session: &mut ShellSession<'_>, mut input: impl BufRead, output: &mut CommandOutput) -> Result<()> {
    let mut line = Vec::new();
    for number in 1u64.. {
        line.clear();
        let n = input.read_until(b'\n', &mut line).map_err(|e| CliError::os("read", "standard input", e))?;
        if n == 0 {
            return check_no_batch(session).map_err(|error| error.in_line(number - 1));
        }
        let end = line.iter().rposition(|byte| !b"\r\n".contains(byte)).map_or(0, |last| last + 1);
        let flow = session.execute_line(&line[..end], output).and_then(|flow| match flow {
            ShellFlow::Continue => Ok(flow),
            ShellFlow::Quit => check_no_batch(session).map(|()| flow),
        });
        output.finish()?;
        if flow.map_err(|error| error.in_line(number))? == ShellFlow::Quit {
            break;
        }
    }
    Ok(())
}

/// Fails if a script ends with an open batch: `commit` was forgotten.
fn check_no_batch(session: &ShellSession<'_>) -> Result<()> {
    match session.batch_len() {
        None => Ok(()),
        Some(writes) => {
            let writes = plural(writes as u64, "write");
            Err(CliError::usage(format!("the script ends without a `commit`; {writes} of its batch were discarded")))
        }
    }
}

fn run_interactive(session: &mut ShellSession<'_>, db: &Path, output: &mut CommandOutput) -> Result<()> {
    interrupt::catch_first()?;
    let mut editor = LineEditor::new()?;
    let version = env!("CARGO_PKG_VERSION");
    let state = if session.db().is_some() { "" } else { ", which `create` or `put --create` creates" };
    output.line(format!("azekura {version}, database {}{state}. `help` lists the commands.", db.display()))?;
    loop {
        output.finish()?;
        let line = match editor.read_line(&session.prompt(), session.db(), session.partition())? {
            TypedLine::Text(line) => line,
            TypedLine::Discarded => continue,
            TypedLine::End => break,
        };
        interrupt::clear();
        match session.execute_line(line.as_bytes(), output) {
            Ok(ShellFlow::Continue) => {}
            Ok(ShellFlow::Quit) => break,
            Err(error) if error.is_pipe_closed() => return Err(error),
            Err(error) => {
                output.finish()?;
                error.report(output.json());
            }
        }
    }
    if let Some(writes) = session.batch_len() {
        print_error(format_args!("azekura: the batch of {} was discarded.", plural(writes as u64, "write")));
    }
    editor.save_history();
    Ok(())
}
