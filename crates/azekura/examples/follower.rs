//! Another process follows a writer. Prints how fast the writer is with and without it, and how old what the follower
//! reads is at most. `cargo run --release --example follower 2000000` measures with 2,000,000 records.
#![expect(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "clippy.toml bans system calls in the engine; an example may use them"
)]

use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use azekura::{Config, Result};

const INTERVAL: Duration = Duration::from_millis(100);

fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_micros() as u64)
}

/// Follows the database until the time in it is 0.
fn follow(path: &Path) -> Result<()> {
    let db = Config::new(path).follow_interval(Some(INTERVAL)).open_follower()?;
    let (clock, mut ages_us, mut last) = (db.partition("clock")?, Vec::new(), None);
    loop {
        std::thread::sleep(Duration::from_millis(1));
        let Some(time) = clock.get("now")? else { continue };
        let (written_us, now_us) = (u64::from_be_bytes(time[..].try_into().expect("8 bytes")), now_us());
        // What a reader sees just before it moves on is as old as it gets.
        ages_us.extend(last.filter(|last| *last != written_us).map(|last| now_us.saturating_sub(last)));
        last = Some(written_us);
        if written_us == 0 {
            break;
        }
    }
    ages_us.sort_unstable();
    if let Some(oldest) = ages_us.last() {
        println!(
            "the follower reads data that is {} ms old in the median, {} ms at most",
            ages_us[ages_us.len() / 2] / 1000,
            oldest / 1000
        );
    }
    Ok(())
}

/// Inserts `records` records of 16 + 100 bytes, and every 64 the time. Returns records per second.
fn write(path: &Path, records: u64, start_follower: impl FnOnce() -> Option<Child>) -> Result<f64> {
    let db = Config::new(path).open()?;
    let data = db.open_partition("data", Default::default())?;
    let clock = db.open_partition("clock", Default::default())?;
    let follower = start_follower();
    let start = Instant::now();
    for i in 0..records {
        let scattered = i.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        data.insert([scattered.to_be_bytes(), i.to_be_bytes()].concat(), [i as u8; 100])?;
        if i % 64 == 0 {
            clock.insert("now", now_us().to_be_bytes())?;
        }
    }
    let rate = records as f64 / start.elapsed().as_secs_f64();
    clock.insert("now", 0u64.to_be_bytes())?;
    if let Some(mut follower) = follower {
        assert!(follower.wait().is_ok_and(|status| status.success()), "the follower has failed");
    }
    Ok(rate)
}

fn main() -> Result<()> {
    let argument = std::env::args().nth(1).unwrap_or_default();
    if Path::new(&argument).is_dir() {
        return follow(Path::new(&argument));
    }
    let records = argument.parse().unwrap_or(20_000);
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (alone, followed) = (dir.path().join("alone"), dir.path().join("followed"));
    let program = std::env::current_exe().expect("this program has a path");
    let alone = write(&alone, records, || None)?;
    let beside =
        write(&followed, records, || Some(Command::new(program).arg(&followed).spawn().expect("a process starts")))?;
    println!("{alone:.0} records/s alone, {beside:.0} beside a follower: {:.2}", beside / alone);
    Ok(())
}
