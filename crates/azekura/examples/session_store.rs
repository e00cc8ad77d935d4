//! Sessions of a web server: a session ends when it was not used for a while, and every use extends it. A cache with a
//! default time to live keeps rendered pages for a second.
#![expect(clippy::disallowed_methods, reason = "clippy.toml bans system calls in the engine; an example may use them")]

use std::time::Duration;

use azekura::{Config, Database, Partition, PartitionCreateOptions, Result};

struct Sessions {
    sessions: Partition,
    idle: Duration,
}

impl Sessions {
    fn open(db: &Database, idle: Duration) -> Result<Sessions> {
        Ok(Sessions { sessions: db.open_partition("sessions", Default::default())?, idle })
    }

    fn log_in(&self, token: &str, user: &str) -> Result<()> {
        self.sessions.insert_with_ttl(token, user, self.idle)
    }

    /// Returns the user of a session and extends the session. The transaction makes sure that a concurrent `log_out`
    /// is not undone.
    fn user(&self, db: &Database, token: &str) -> Result<Option<String>> {
        db.transact(|tx| {
            let Some(user) = tx.get(&self.sessions, token)? else { return Ok(None) };
            tx.insert_with_ttl(&self.sessions, token, &user, self.idle)?;
            Ok(Some(String::from_utf8_lossy(&user).into_owned()))
        })
    }

    fn log_out(&self, token: &str) -> Result<()> {
        self.sessions.remove(token)
    }
}

fn main() -> Result<()> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let db = Config::new(dir.path().join("db")).open()?;
    let sessions = Sessions::open(&db, Duration::from_millis(400))?;
    sessions.log_in("token of ada", "ada")?;
    sessions.log_in("token of grace", "grace")?;
    sessions.log_in("token of alan", "alan")?;
    sessions.log_out("token of alan")?;
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(sessions.user(&db, "token of ada")?.as_deref(), Some("ada"));
    }
    // Only ada was active.
    assert_eq!(sessions.user(&db, "token of grace")?, None);
    assert_eq!(sessions.sessions.len()?, 1);

    let cache = PartitionCreateOptions::default().default_ttl(Duration::from_secs(1));
    let cache = db.open_partition("pages", cache)?;
    cache.insert("/", "<h1>Hello</h1>")?;
    println!("{} session, page in the cache: {}", sessions.sessions.len()?, cache.contains_key("/")?);
    db.close()
}
