-- Runs the step on each entry of the call, in order, and answers with the list of their replies. Each entry
-- answers for itself. KEYS: the rollout of each. ARGV: of each the number of its arguments, then these.
local replies, at = {}, 1
for number, rollout in ipairs(KEYS) do
  key, first, wrote = rollout, at, false
  replies[number] = step()
  if CONFIRMED and not wrote and replies[number][1] ~= 'ERROR' then write_again() end
  at = at + ARGV[at] + 1
end
return replies
