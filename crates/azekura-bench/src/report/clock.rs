//! Date and time of the system's clock, in words.

use std::time::{SystemTime, UNIX_EPOCH};

/// Now, as `2026-03-01 12:00 UTC`.
pub(crate) fn now() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    date(since.as_secs())
}

/// Seconds since 1970 as date and time, UTC.
fn date(seconds: u64) -> String {
    let (mut days, rest) = (seconds / 86_400, seconds % 86_400);
    let mut year = 1970;
    while days >= year_days(year) {
        days -= year_days(year);
        year += 1;
    }
    let leap = year_days(year) - 365;
    let mut month = 1;
    for length in [31, 28 + leap, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    format!("{year}-{month:02}-{:02} {:02}:{:02} UTC", days + 1, rest / 3600, rest / 60 % 60)
}

fn year_days(year: u64) -> u64 {
    let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    365 + u64::from(leap)
}

#[cfg(test)]
mod tests {
    use super::date;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00 UTC"),
            (68_169_600 - 60, "1972-02-28 23:59 UTC"),
            (68_169_600, "1972-02-29 00:00 UTC"),
            (68_256_000, "1972-03-01 00:00 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (1_767_225_599, "2025-12-31 23:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
        ] {
            assert_eq!(date(seconds), text);
        }
    }
}
