// Other plans beside this one: baselines, or a plan that the user compares it with.

function compareSection() {
  const data = DATA.compare;
  if (!data) return null;
  const slowest = Math.max(...data.rows.filter((row) => !row.failure).map((row) => row.step_s));
  const others = data.rows.slice(1).filter((row) => !row.failure && row.fits);
  const best = others.length ? others.reduce((a, b) => (a.step_s < b.step_s ? a : b)) : null;
  let verdict = "None of the others fits into memory.";
  if (best && Math.abs(best.ratio - 1) < 0.005)
    verdict = `The best of the others that fits, ${best.name}, is predicted to take the same time.`;
  else if (best && best.ratio < 1)
    verdict = `${best.name} is predicted to be faster: ${percent(best.ratio)} of this plan's step.`;
  else if (best)
    verdict = `The best of the others that fits, ${best.name}, is predicted to take ${digits(best.ratio, 3)} times as long.`;
  const none = (row, show) => (row.failure ? "–" : show(row));
  return section(
    "compare",
    "Was it worth it?",
    verdict,
    legend([
      ["compute", 0],
      ["communication", 3],
      ["waiting and launches", 6],
    ]),
    sortable(
      [
        {
          name: "Plan",
          of: (row) => row.name,
          show: (row) => [
            make("strong", {}, row.name),
            make("div", { class: "soft" }, row.failure || row.where),
          ],
          class: "wrap",
        },
        { name: "Step", of: (row) => row.step_s, show: (row) => none(row, (r) => seconds(r.step_s)), number: true },
        { name: "Ratio", of: (row) => row.ratio, show: (row) => none(row, (r) => `${digits(r.ratio, 3)}×`), number: true },
        {
          name: "Time",
          of: (row) => row.step_s,
          show: (row) =>
            none(row, (r) =>
              stack(
                [
                  ["compute", r.compute_s, 0],
                  ["communication", r.communication_s, 3],
                  ["waiting and launches", r.waiting_s, 6],
                ],
                slowest,
              ),
            ),
        },
        { name: "Peak memory", of: (row) => row.peak_bytes, show: (row) => none(row, (r) => bytes(r.peak_bytes)), number: true },
        { name: "Fits", of: (row) => row.fits, show: (row) => none(row, (r) => (r.fits ? "yes" : "no")) },
      ],
      data.rows,
      { label: "Plans compared", rowClass: (row) => (row.name === "this plan" ? "chosen" : null) },
    ),
    data.diff
      ? make("details", {}, make("summary", {}, "What differs"), make("pre", { class: "code scroll" }, data.diff))
      : null,
  );
}
