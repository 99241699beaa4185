//! Growth per day, and the size to come.

/// Days that growth is measured over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GrowthWindow {
    /// The last 24 hours.
    Day,
    /// The last seven days.
    Week,
    /// The last 30 days.
    Month,
}

/// Least number of sampled pages that a growth window of a class is to be in. With fewer, one page
/// more or less would be a tenth of the growth or more.
const PAGES_MIN: f64 = 50.0;

/// The time that the sample of a partition covers, as ages in days, and its extent.
#[derive(Debug, Clone, Copy)]
pub(super) struct SampledSpan {
    /// Age of its begin. Negative for a partition whose time is still to come.
    pub(super) from_days: f64,
    /// Age of its end; 0 where its time is not over.
    pub(super) to_days: f64,
    /// Pages of the sample.
    pub(super) pages: f64,
    /// Whether the partition was read whole.
    pub(super) is_whole: bool,
}

impl GrowthWindow {
    /// All of them, the shortest first.
    pub(super) const ALL: [Self; 3] = [Self::Day, Self::Week, Self::Month];

    /// Returns its length.
    pub(super) const fn days(self) -> i64 {
        match self {
            Self::Day => 1,
            Self::Week => 7,
            Self::Month => 30,
        }
    }

    /// Returns its position among [`ALL`](Self::ALL).
    pub(super) const fn index(self) -> usize {
        match self {
            Self::Day => 0,
            Self::Week => 1,
            Self::Month => 2,
        }
    }

    /// Returns the window for a retention class, from its samples: the last 24 hours where they
    /// hold enough of them. In a large partition of many days, a sample holds a few pages of the
    /// last day alone, so that more days are looked at.
    pub(super) fn of(spans: &[SampledSpan]) -> Self {
        let holds_enough = |window: &Self| {
            let days = window.days() as f64;
            let within = spans.iter().filter(|span| span.from_days > 0.0 && span.to_days < days);
            within.clone().all(|span| span.is_whole)
                || within.map(|span| span.pages_within(days)).sum::<f64>() >= PAGES_MIN
        };
        Self::ALL.into_iter().find(holds_enough).unwrap_or(Self::Month)
    }

    /// Returns the days over which a consumer of an age has grown within the window: all of them,
    /// or those since its creation. A consumer of its first day is not taken for a whole one.
    pub(super) fn days_of(self, age_days: f64) -> f64 {
        (self.days() as f64).min(age_days.max(1.0))
    }
}

impl SampledSpan {
    /// Returns the pages that hold messages of the last days, if the partition filled evenly.
    fn pages_within(&self, days: f64) -> f64 {
        let span = (self.from_days - self.to_days).max(f64::MIN_POSITIVE);
        self.pages * ((days.min(self.from_days) - self.to_days) / span).clamp(0.0, 1.0)
    }
}

/// Size and growth of a consumer's inbox.
#[derive(Debug, Clone, Copy)]
pub(super) struct Forecast {
    /// Present size.
    pub(super) bytes: f64,
    /// Growth, before anything is removed.
    pub(super) bytes_per_day: f64,
    /// Longest time that messages stay, days; none for ever.
    pub(super) kept_days: Option<f64>,
}

impl Forecast {
    /// Returns the size at which the inbox levels off; none where it grows without end.
    pub(super) fn level(&self) -> Option<f64> {
        self.kept_days.map(|kept_days| self.bytes_per_day * kept_days)
    }

    /// Returns the size after some days of the present growth. Below its level an inbox grows up to
    /// it. Above, it shrinks evenly to it, until all messages of today are removed.
    pub(super) fn in_days(&self, days: f64) -> f64 {
        let grown = self.bytes + self.bytes_per_day * days;
        match self.level().zip(self.kept_days) {
            None => grown,
            Some((level, _)) if self.bytes <= level => grown.min(level),
            Some((level, kept_days)) => {
                self.bytes - (self.bytes - level) * (days / kept_days).min(1.0)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(from_days: f64, to_days: f64, pages: f64, is_whole: bool) -> SampledSpan {
        SampledSpan { from_days, to_days, pages, is_whole }
    }

    // What could go wrong: the growth of a large inbox is read from a page or two; or that of a
    // small one, which is read whole, is the mean of a month.
    #[test]
    fn growth_is_of_a_day_where_the_sample_holds_enough_of_it() {
        for (spans, expected) in [
            (vec![], GrowthWindow::Day),
            (vec![span(366.0, 0.0, 900.0, true)], GrowthWindow::Day),
            // A third of the pages of a bucket of 56 hours.
            (vec![span(2.3, 0.0, 1_000.0, false)], GrowthWindow::Day),
            (vec![span(10.0, 0.0, 1_000.0, false)], GrowthWindow::Day),
            // 8 pages of a day, 57 of a week.
            (vec![span(122.0, 0.0, 1_000.0, false)], GrowthWindow::Week),
            (vec![span(366.0, 0.0, 1_000.0, false)], GrowthWindow::Month),
            (vec![span(15.0, 0.0, 1_000.0, false)], GrowthWindow::Day),
            // The present bucket is an hour old, so that most of the day is in the one before.
            (
                vec![span(0.04, 0.0, 30.0, true), span(122.04, 0.04, 1_000.0, false)],
                GrowthWindow::Week,
            ),
            // A bucket that is over, and one to come, say nothing of the last day.
            (vec![span(5.0, 2.0, 1_000.0, false), span(2.0, 0.0, 10.0, true)], GrowthWindow::Day),
            (vec![span(-3.0, 0.0, 1_000.0, false), span(2.0, 0.0, 10.0, true)], GrowthWindow::Day),
        ] {
            assert_eq!(GrowthWindow::of(&spans), expected, "{spans:?}");
        }
        let days = [0.1, 3.0, 90.0].map(|age| GrowthWindow::Week.days_of(age));
        assert_eq!(days, [1.0, 3.0, 7.0]);
    }

    // What could go wrong: an inbox that is cleaned up is said to grow for ever, or one that keeps
    // everything to level off.
    #[test]
    fn an_inbox_levels_off_where_messages_are_removed() {
        let forecast = |bytes, bytes_per_day, kept_days| {
            let forecast = Forecast { bytes, bytes_per_day, kept_days };
            (forecast.level(), forecast.in_days(30.0), forecast.in_days(365.0))
        };
        // S3-012.
        assert_eq!(forecast(100.0, 10.0, None), (None, 400.0, 3_750.0));
        // It fills up to ten days of growth, and stays there.
        assert_eq!(forecast(20.0, 10.0, Some(10.0)), (Some(100.0), 100.0, 100.0));
        assert_eq!(forecast(100.0, 10.0, Some(10.0)), (Some(100.0), 100.0, 100.0));
        assert_eq!(forecast(20.0, 10.0, Some(40.0)), (Some(400.0), 320.0, 400.0));
        // Less comes than before: after 30 of 40 days, three quarters of what is too much are gone.
        assert_eq!(forecast(800.0, 10.0, Some(40.0)), (Some(400.0), 500.0, 400.0));
        assert_eq!(forecast(800.0, 0.0, Some(40.0)), (Some(0.0), 200.0, 0.0));
        assert_eq!(forecast(0.0, 0.0, None), (None, 0.0, 0.0));
    }
}
