//! Plots as SVG text: a few lines over a logarithmic axis, for light and dark pages.

use std::fmt::Write as _;

/// One line of a plot.
pub struct Line {
    /// Name in the legend.
    pub name: String,
    /// Points, in ascending order of the horizontal value.
    pub points: Vec<(f64, f64)>,
}

/// A plot of ratios.
pub struct Plot {
    /// Title.
    pub title: String,
    /// Title of the horizontal axis.
    pub x_title: String,
    /// Title of the vertical axis.
    pub y_title: String,
    /// Values on the horizontal axis, and their names.
    pub x_ticks: Vec<(f64, String)>,
    /// The lines.
    pub lines: Vec<Line>,
    /// Name in the legend of the level 1.
    pub one: String,
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 700.0;
const TOP: f64 = 78.0;
const BOTTOM: f64 = 340.0;

/// Style sheet. Its colours differ on white and on black, also for colour-blind readers. The dash
/// separates the lines without any colour.
pub const STYLE: &str = "\
text { font: 13px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600; font-size: \
15px } \
.quiet { fill: #59636e } .grid { stroke: #d1d9e0; stroke-width: 1 } .one { stroke: #59636e; \
stroke-width: 1.5; stroke-dasharray: 2 4 } \
.line { fill: none; stroke-width: 2.5; stroke-linejoin: round } .line0 { stroke: #0969da } .line1 \
{ stroke: #bc4c00; stroke-dasharray: 8 4 } \
.dot0 { fill: #0969da } .dot1 { fill: #bc4c00 } \
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .quiet { fill: #9198a1 } .grid { \
stroke: #3d444d } .one { stroke: #9198a1 } \
.line0 { stroke: #58a6ff } .line1 { stroke: #f0883e } .dot0 { fill: #58a6ff } .dot1 { fill: \
#f0883e } }";

impl Plot {
    /// Returns the plot as SVG text.
    pub fn svg(&self) -> String {
        let (title, x_title, y_title) =
            (escaped(&self.title), escaped(&self.x_title), escaped(&self.y_title));
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
                width=\"{WIDTH}\" height=\"{HEIGHT}\" role=\"img\" \
             aria-label=\"{title}\">\n<style>{STYLE}</style>\n<text class=\"title\" x=\"16\" \
             y=\"24\">{title}</text>\n\
             <text class=\"quiet\" x=\"16\" y=\"44\">{y_title}</text>\n\
             <text class=\"quiet\" x=\"{:.1}\" y=\"{:.1}\" \
             text-anchor=\"middle\">{x_title}</text>\n",
            (LEFT + RIGHT) / 2.0,
            BOTTOM + 46.0
        );
        self.grid(&mut svg);
        self.legend(&mut svg);
        for (index, line) in self.lines.iter().enumerate() {
            self.line(&mut svg, index, line);
        }
        svg.push_str("</svg>\n");
        svg
    }

    fn grid(&self, svg: &mut String) {
        let step = step(self.top());
        let mut level = 0.0;
        while level <= self.top() + step / 2.0 {
            let y = self.y(level);
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>"
            );
            let _ = writeln!(
                svg,
                "<text class=\"quiet\" x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{level}×</text>",
                LEFT - 8.0,
                y + 4.5
            );
            level += step;
        }
        for (value, name) in &self.x_ticks {
            let x = self.x(*value);
            let _ = writeln!(
                svg,
                "<text class=\"quiet\" x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                BOTTOM + 20.0,
                escaped(name)
            );
        }
        let y = self.y(1.0);
        let _ = writeln!(
            svg,
            "<line class=\"one\" x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>"
        );
    }

    /// Writes the names above the plot, each after a piece of its line.
    fn legend(&self, svg: &mut String) {
        let mut x = 16.0;
        let names = self
            .lines
            .iter()
            .enumerate()
            .map(|(index, line)| (format!("line line{index}"), line.name.as_str()));
        for (class, name) in names.chain([("one".to_owned(), self.one.as_str())]) {
            let _ = writeln!(
                svg,
                "<line class=\"{class}\" x1=\"{x:.1}\" x2=\"{:.1}\" y1=\"60\" y2=\"60\"/>",
                x + 28.0
            );
            let _ =
                writeln!(svg, "<text x=\"{:.1}\" y=\"64.5\">{}</text>", x + 34.0, escaped(name));
            x += 34.0 + 7.2 * name.chars().count() as f64 + 22.0;
        }
    }

    fn line(&self, svg: &mut String, index: usize, line: &Line) {
        let place = |(x, y): &(f64, f64)| format!("{:.1},{:.1}", self.x(*x), self.y(*y));
        let places: Vec<_> = line.points.iter().map(place).collect();
        let _ =
            writeln!(svg, "<polyline class=\"line line{index}\" points=\"{}\"/>", places.join(" "));
        for (x, y) in &line.points {
            let (name, at_x, at_y) = (escaped(&line.name), self.x(*x), self.y(*y));
            let _ = writeln!(
                svg,
                "<circle class=\"dot{index}\" cx=\"{at_x:.1}\" cy=\"{at_y:.1}\" \
                    r=\"4\"><title>{name}: {y:.2}×</title></circle>"
            );
        }
    }

    fn top(&self) -> f64 {
        let highest =
            self.lines.iter().flat_map(|line| &line.points).map(|(_, y)| *y).fold(1.0, f64::max);
        (highest / step(highest)).ceil() * step(highest)
    }

    fn y(&self, value: f64) -> f64 {
        BOTTOM - (BOTTOM - TOP) * value / self.top()
    }

    fn x(&self, value: f64) -> f64 {
        let (first, last) = (
            self.x_ticks.first().map_or(1.0, |tick| tick.0),
            self.x_ticks.last().map_or(2.0, |tick| tick.0),
        );
        let share = if last > first { (value / first).ln() / (last / first).ln() } else { 0.5 };
        LEFT + 24.0 + (RIGHT - LEFT - 48.0) * share
    }
}

/// Returns the distance of the grid's lines, so that at most eight are above zero.
fn step(top: f64) -> f64 {
    [0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0]
        .into_iter()
        .find(|step| top / step <= 8.0)
        .unwrap_or(100.0)
}

/// Returns a text as it stands in SVG.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_holds_its_points_within_its_frame() {
        let line = |name: &str, points: &[(f64, f64)]| Line {
            name: name.to_owned(),
            points: points.to_vec(),
        };
        let plot = Plot {
            title: "a < b".to_owned(),
            x_title: "x".to_owned(),
            y_title: "y".to_owned(),
            x_ticks: vec![(100.0, "100 B".to_owned()), (65_536.0, "64 KiB".to_owned())],
            lines: vec![
                line("one", &[(100.0, 3.2), (65_536.0, 1.1)]),
                line("two", &[(100.0, 6.7), (65_536.0, 0.2)]),
            ],
            one: "by hand".to_owned(),
        };
        let svg = plot.svg();
        assert!(svg.contains("a &lt; b") && svg.matches("<circle").count() == 4);
        for (x, y) in plot.lines.iter().flat_map(|line| &line.points) {
            assert!(
                (LEFT..=RIGHT).contains(&plot.x(*x)) && (TOP..=BOTTOM).contains(&plot.y(*y)),
                "{x} {y}"
            );
        }
    }
}
