-- Announces a model call: an open intent, unless the call is settled or announced already.
-- 1  incarnation to give the rollout if it is new
-- 2  call
-- Reply    OK, names of the newest chain ends | SAME (nothing to do), the same | FROZEN | RETIRED
-- Repeat   safe: SAME
local row_field = 'c:' .. arg(2)
local state, err, known = load_state(row_field)
if err then return err end
if state then
  if state.status ~= 'open' then return reply(string.upper(state.status), state) end
  keep(state)
  if known[1] then return reply('SAME', state, state.ends) end
else
  state = new_state(arg(1))
end
state.intents = state.intents + 1
local trace = next_step(state)
write(state, trace, '0:n:' .. arg(2), row_field, 'n')
return reply('OK', state, state.ends)
