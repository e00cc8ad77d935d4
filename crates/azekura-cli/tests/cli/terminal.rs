//! Runs the built program at a pseudo-terminal.

use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use nix::pty::{Winsize, openpty};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::fixture::CliFixture;

/// Longest time that a test waits for an output.
const PATIENCE: Duration = Duration::from_secs(600);

/// A program at a terminal, and what it has printed.
pub(crate) struct Terminal {
    child: Child,
    keyboard: File,
    output: Receiver<Vec<u8>>,
    text: String,
    /// `wait_for` has consumed the output before this position.
    seen: usize,
}

impl Terminal {
    /// Starts the program; the history of the shell is the file "history" of the fixture.
    pub(crate) fn run(p: &CliFixture, args: &[&str]) -> Terminal {
        let size = Winsize { ws_row: 50, ws_col: 200, ws_xpixel: 0, ws_ypixel: 0 };
        let pty = openpty(&size, None).unwrap();
        let end = || Stdio::from(pty.slave.try_clone().unwrap());
        let mut command = p.command(args);
        command.env("AZEKURA_HISTORY", p.path("history")).env("TERM", "xterm");
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        let keyboard = File::from(pty.master);
        let mut screen = keyboard.try_clone().unwrap();
        // Without a buffer, the program waits until the test has read its output.
        let (sender, output) = sync_channel(0);
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // Reading fails when the program has ended.
            while let Ok(n @ 1..) = screen.read(&mut bytes) {
                let _ = sender.send(bytes[..n].to_vec());
            }
        });
        Terminal { child, keyboard, output, text: String::new(), seen: 0 }
    }

    /// Everything that was printed.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Types keys, and waits until `expected` is printed.
    pub(crate) fn type_until(&mut self, keys: &str, expected: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
        self.wait_for(expected);
    }

    /// Waits until `expected` is printed after the output that earlier calls waited for.
    pub(crate) fn wait_for(&mut self, expected: &str) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(at) = self.text[self.seen..].find(expected) {
                self.seen += at + expected.len();
                return;
            }
            let remaining = deadline.saturating_duration_since(Instant::now());
            let Ok(bytes) = self.output.recv_timeout(remaining) else {
                panic!("{expected:?} was not printed: {:?}", &self.text[self.seen..]);
            };
            self.text.push_str(&String::from_utf8_lossy(&bytes));
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    /// Waits for the end of the program, and returns its exit code.
    pub(crate) fn end(&mut self) -> Option<i32> {
        while let Ok(bytes) = self.output.recv_timeout(PATIENCE) {
            self.text.push_str(&String::from_utf8_lossy(&bytes));
        }
        self.child.wait().unwrap().code()
    }
}
